"""Names of the store's keys in Redis, and the Lua scripts that change them.

Each value of the store is a Redis list of one element, so that one command can wait for the value and read it. `BLMOVE
key key LEFT LEFT seconds` blocks until the list has an element, then moves the element from the list to the same list.
The server wakes every waiting reader in turn. No reader polls, no wake-up is lost, and repeating the command on a new
connection is harmless.

All keys of a job contain the job's name in braces, so that a sharded server keeps them on one shard.
"""

from __future__ import annotations

from dataclasses import dataclass

JOIN_MS = 10_000  # lifetime of the join key unless the owner renews it
# Value of the verdict key of a superseded start. It wakes that start's waiting ranks, which then raise Superseded.
SUPERSEDED = b"\x00superseded"


@dataclass(frozen=True)
class JobKeys:
    """Names of a job's keys.

    A job has attempts, which the launcher numbers. Each start of an attempt draws an epoch, a random name. `fence`
    holds the token `attempt:epoch` of the only start whose changes are accepted. `join` exists while a start is under
    way, and holds the epoch for joining ranks. All other keys contain the epoch.

    Attributes:
        attempt: number of the attempt; a higher one fences off the lower ones.
        epoch: name of this start, or an empty string before the job is opened or joined.
    """

    job: str
    attempt: int
    epoch: str = ""

    @property
    def fence(self) -> str:
        """Key of the token of the current start."""
        return f"megascale:{{{self.job}}}:fence"

    @property
    def join(self) -> str:
        """Key that exists while ranks may join. Its value is the epoch and the server's run id."""
        return f"megascale:{{{self.job}}}:door:{self.attempt}"

    @property
    def token(self) -> str:
        """Value of `fence` while this start is the current one."""
        return f"{self.attempt}:{self.epoch}"

    @property
    def index(self) -> str:
        """Key of the set of all data keys of the epoch, for counting and removing them."""
        return self._epoch_key("index")

    @property
    def last_changes(self) -> str:
        """Key of a hash that holds the number and the answer of the last change by session name."""
        return self._epoch_key("done")

    @property
    def complete_on(self) -> str:
        """Key of the run id of the server process that holds all data of the epoch.

        A process that finds another run id writes its values again, because the server has restarted.
        """
        return self._epoch_key("life")

    def value_key(self, key: str) -> str:
        """Return the Redis key of the list that holds the value of a store key."""
        return self._epoch_key(f"k:{key}")

    def queue_key(self, key: str) -> str:
        """Return the Redis key of the queue of a store key."""
        return self._epoch_key(f"q:{key}")

    def popped_key(self, pop_id: str) -> str:
        """Return the Redis key of the list that receives an element from a queue for one blocking pop."""
        return self._epoch_key(f"t:{pop_id}")

    def _epoch_key(self, suffix: str) -> str:
        return f"megascale:{{{self.job}}}:{self.epoch}:{suffix}"


# Script that makes one change. If the session has already made the change with this number, the script returns the
# first answer. KEYS: fence, index, last_changes, then data keys. ARGV: token, session name, number of the change within
# the session, expiry in ms, operation, arguments of the operation.
CHANGE = """
local token = redis.call('GET', KEYS[1])
if token ~= ARGV[1] then
  return redis.error_reply(token and ('FENCED ' .. token) or 'GONE')
end
local last_change = redis.call('HGET', KEYS[3], ARGV[2])
if last_change then
  local space = string.find(last_change, ' ', 1, true)
  if string.sub(last_change, 1, space - 1) == ARGV[3] then return string.sub(last_change, space + 1) end
end
local function put(key, value)
  -- SADD comes first because it needs memory: a server out of memory refuses a script only at its first write.
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
  local stored = redis.call('LINDEX', KEYS[4], 0)
  if (stored and stored == ARGV[6]) or (not stored and ARGV[6] == '') then
    put(KEYS[4], ARGV[7])
    answer = ARGV[7]
  else
    answer = stored or ARGV[6]
  end
elseif op == 'add' then
  -- INCRBY adds, because Lua's numbers are exact only up to 2^53.
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

# Script by which the owner opens a job: it sets the fence and the join key, unless a later attempt holds the fence.
# KEYS: fence, join. ARGV: attempt, epoch, expiry in ms, expiry of the join key in ms, run id of the server.
OPEN = """
local token = redis.call('GET', KEYS[1])
if token then
  local colon = string.find(token, ':', 1, true)
  if tonumber(string.sub(token, 1, colon - 1)) > tonumber(ARGV[1]) then return redis.error_reply('FENCED ' .. token) end
end
redis.call('SET', KEYS[1], ARGV[1] .. ':' .. ARGV[2], 'PX', ARGV[3])
redis.call('DEL', KEYS[2])
redis.call('RPUSH', KEYS[2], ARGV[2] .. ' ' .. ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 1
"""

# Script that each process runs after the server has restarted and lost its data. In the first process it deletes the
# keys that an old snapshot may have restored, and returns 1. KEYS: fence, index, last_changes, complete_on, join. ARGV:
# token, expiry in ms, run id of the server, value of the join key, expiry of the join key in ms. The value of the join
# key is empty except for the owner of a start that is under way.
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
