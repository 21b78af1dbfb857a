"""Names of the store's keys in Redis, and the Lua scripts that change them.

A value of the store is a Redis list of one element. Reading is then one command that also waits: `BLMOVE key key
LEFT LEFT seconds` takes the element and puts it back, and blocks until there is one. The server wakes every waiting
reader in turn. No reader polls, no wake-up is lost, and repeating the command on a new connection is harmless.

All keys of a job contain the job's name in braces, so that a sharded server keeps them on one shard.
"""

from __future__ import annotations

from dataclasses import dataclass

JOIN_MS = 10_000  # lifetime of the join key unless the owner renews it
# Verdict of an older start, which wakes its readers and sends them to the new start.
SUPERSEDED = b"\x00superseded"


@dataclass(frozen=True)
class JobKeys:
    """Names of a job's keys.

    `fence` holds the token `attempt:epoch` of the only start whose changes are accepted. `join` exists while a start is
    under way, and tells joining ranks the epoch. All other keys belong to one epoch, which is one start of an attempt.
    """

    job: str
    attempt: int
    epoch: str = ""

    @property
    def fence(self) -> str:
        return f"megascale:{{{self.job}}}:fence"

    @property
    def join(self) -> str:
        return f"megascale:{{{self.job}}}:door:{self.attempt}"

    @property
    def token(self) -> str:
        return f"{self.attempt}:{self.epoch}"

    @property
    def index(self) -> str:
        """Set of all data keys, for counting and cleaning."""
        return self._epoch_key("index")

    @property
    def last_changes(self) -> str:
        """Hash of each connection slot's last change and its answer, so that a repeated change happens once."""
        return self._epoch_key("done")

    @property
    def complete_on(self) -> str:
        """Run id of the server process that has the complete data of the epoch."""
        return self._epoch_key("life")

    def value_key(self, key: str) -> str:
        """Return the Redis key of the list that holds the value of a store key."""
        return self._epoch_key(f"k:{key}")

    def queue_key(self, key: str) -> str:
        """Return the Redis key of the queue of a store key."""
        return self._epoch_key(f"q:{key}")

    def popped_key(self, slot: str) -> str:
        """Return the Redis key of the list through which an element moves from a queue to the process that pops it."""
        return self._epoch_key(f"t:{slot}")

    def _epoch_key(self, suffix: str) -> str:
        return f"megascale:{{{self.job}}}:{self.epoch}:{suffix}"


# KEYS: fence, index, last_changes, then data keys. ARGV: token, slot, number, expiry in ms, operation, arguments.
CHANGE = """
local token = redis.call('GET', KEYS[1])
if token ~= ARGV[1] then
  return redis.error_reply(token and ('FENCED ' .. token) or 'GONE')
end
local done = redis.call('HGET', KEYS[3], ARGV[2])
if done then
  local cut = string.find(done, ' ', 1, true)
  if string.sub(done, 1, cut - 1) == ARGV[3] then return string.sub(done, cut + 1) end
end
local function put(key, value)
  -- SADD comes first: a server out of memory refuses a script at its first write only if that needs memory.
  redis.call('SADD', KEYS[2], key)
  redis.call('DEL', key)
  redis.call('RPUSH', key, value)
  redis.call('PEXPIRE', key, ARGV[4])
end
local op, answer = ARGV[5], ''
if op == 'set' then
  for i = 4, #KEYS do put(KEYS[i], ARGV[i + 2]) end
elseif op == 'fill' then
  for i = 4, #KEYS do
    if redis.call('EXISTS', KEYS[i]) == 0 then put(KEYS[i], ARGV[i + 2]) end
  end
elseif op == 'compare' then
  local now = redis.call('LINDEX', KEYS[4], 0)
  if (now and now == ARGV[6]) or (not now and ARGV[6] == '') then
    put(KEYS[4], ARGV[7])
    answer = ARGV[7]
  else
    answer = now or ARGV[6]
  end
elseif op == 'add' then
  -- Redis itself adds: Lua's numbers are exact to 2^53 only.
  local sum = KEYS[4] .. ':sum'
  redis.call('SET', sum, redis.call('LINDEX', KEYS[4], 0) or '0')
  redis.call('INCRBY', sum, ARGV[6])
  answer = redis.call('GET', sum)
  redis.call('DEL', sum)
  put(KEYS[4], answer)
elseif op == 'append' then
  put(KEYS[4], (redis.call('LINDEX', KEYS[4], 0) or '') .. ARGV[6])
elseif op == 'delete' then
  answer = tostring(redis.call('DEL', KEYS[4]))
  redis.call('SREM', KEYS[2], KEYS[4])
elseif op == 'push' then
  redis.call('RPUSH', KEYS[4], ARGV[6])
  redis.call('PEXPIRE', KEYS[4], ARGV[4])
  redis.call('SADD', KEYS[2], KEYS[4])
elseif op == 'pop' then
  local first = redis.call('LPOP', KEYS[4])
  answer = first and ('+' .. first) or '-'
elseif op == 'list' then
  redis.call('SADD', KEYS[2], KEYS[4])
end
redis.call('HSET', KEYS[3], ARGV[2], ARGV[3] .. ' ' .. answer)
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return answer
"""

# KEYS: fence, join. ARGV: attempt, epoch, expiry in ms, expiry of the join key in ms, run id of the server.
OPEN = """
local token = redis.call('GET', KEYS[1])
if token then
  local cut = string.find(token, ':', 1, true)
  if tonumber(string.sub(token, 1, cut - 1)) > tonumber(ARGV[1]) then return redis.error_reply('FENCED ' .. token) end
end
redis.call('SET', KEYS[1], ARGV[1] .. ':' .. ARGV[2], 'PX', ARGV[3])
redis.call('DEL', KEYS[2])
redis.call('RPUSH', KEYS[2], ARGV[2] .. ' ' .. ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 1
"""

# Processes run it after the server has restarted and lost its data. The first one deletes the keys that an old snapshot
# may have restored, and gets the answer 1. KEYS: fence, index, last_changes, complete_on, join. ARGV: token, expiry in
# ms, run id of the server, value of the join key, expiry of the join key in ms. The value of the join key is empty
# except for the owner of a start that is under way.
REVIVE = """
local token = redis.call('GET', KEYS[1])
if token and token ~= ARGV[1] then
  local holder = tonumber(string.sub(token, 1, string.find(token, ':', 1, true) - 1))
  local attempt = tonumber(string.sub(ARGV[1], 1, string.find(ARGV[1], ':', 1, true) - 1))
  if holder >= attempt then return redis.error_reply('FENCED ' .. token) end
end
if ARGV[4] ~= '' then
  redis.call('DEL', KEYS[5])
  redis.call('RPUSH', KEYS[5], ARGV[4])
  redis.call('PEXPIRE', KEYS[5], ARGV[5])
end
if token == ARGV[1] and redis.call('GET', KEYS[4]) == ARGV[3] then return 0 end
for _, key in ipairs(redis.call('SMEMBERS', KEYS[2])) do redis.call('DEL', key) end
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[4], ARGV[3], 'PX', ARGV[2])
return 1
"""
