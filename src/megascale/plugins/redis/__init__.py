"""Rendezvous through a Redis server: `rendezvous.url=redis://HOST:PORT`, or `rediss://` with TLS.

Needs `pip install 'megascale[redis]'`. hiredis, the C library of the Redis project, writes and reads the protocol.
This package implements connections, deadlines and reconnection, because redis-py costs each rank about twice the
processor time (dev/log.md, Redis clients).
"""

from megascale.plugins.redis.redis_store import open_redis_store
from megascale.rendezvous.stores import STORES

STORES.register("redis", open_redis_store)
