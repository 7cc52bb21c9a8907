"""Every private name of torch, and what differs between its releases.

A new torch release may break these files and no others. Names are looked up inside functions, so
that importing them starts neither Dynamo nor Inductor. Differences are detected by signature or
attribute, never by version.
"""
