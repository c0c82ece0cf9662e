"""Objects: runs of bytes of a fixed size in this process' memory, each under one key.

What the connectors of cache servers have in common. To the host an object is a chunk of one block with one page. An
:class:`ObjectStore` stores, looks up and loads batches of them, and finds the host again after it was gone.
"""

from kvhost.objects.connection import Connection, Connector
from kvhost.objects.kind import Kind
from kvhost.objects.space import Space
from kvhost.objects.store import Hit, Memory, ObjectStore, StoreObject

__all__ = ["Connection", "Connector", "Hit", "Kind", "Memory", "ObjectStore", "Space", "StoreObject"]
