"""Objects: bytes of a fixed size in this process' memory, under one key each.

What the connectors of cache servers have in common. To the host an object is a chunk of one block. An
:class:`ObjectStore` stores, looks up and loads batches of them, and finds the host again after it was gone.
"""

from kvhost.objects.connection import Connection, Connector
from kvhost.objects.inplace import Mapping, Place
from kvhost.objects.kind import Kind
from kvhost.objects.locks import Locks
from kvhost.objects.options import HostOptions, Options
from kvhost.objects.space import Space
from kvhost.objects.store import Addresses, Hit, ObjectStore, StoreObject

__all__ = [
    "Addresses", "Connection", "Connector", "Hit", "HostOptions", "Kind", "Locks", "Mapping", "ObjectStore", "Options",
    "Place", "Space", "StoreObject",
]
