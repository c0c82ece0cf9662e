"""Objects: bytes of a fixed size in this process's memory, each with a key.

This is the common part of connectors of cache servers. An object is a chunk of one block in the host. An
:class:`ObjectStore` stores, looks up and loads batches of objects, and connects again after the host was gone.
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
