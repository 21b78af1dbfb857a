"""The store's data in Redis: names of keys, and the one Lua script through which everything is changed.

A value of the store is a Redis list of one element. Reading is then one command that also waits: `BLMOVE key key
LEFT LEFT seconds` takes the element and puts it back, and blocks until there is one. Every reader that waits is
woken by the server in turn; nobody polls, nothing is lost between looking and waiting, and asking again after a
broken connection does no harm.

All keys of a job carry the job's name in braces, so that on a sharded server they lie together.
"""

from __future__ import annotations

from dataclasses import dataclass

# Milliseconds for which the door stays open without its owner.
DOOR_MS = 10_000
# Written as an older start's verdict, where its readers wait, so that they wake and go to the new one.
SUPERSEDED = b"\x00superseded"


@dataclass(frozen=True)
class Names:
    """Names of a job's keys.

    `fence` holds `attempt:epoch`, the only writer's token that is accepted. `door` exists while a start is under
    way and tells newcomers the epoch. The rest belongs to one epoch (one start of one attempt).
    """

    job: str
    attempt: int
    epoch: str = ""

    @property
    def base(self) -> str:
        return f"megascale:{{{self.job}}}"

    @property
    def fence(self) -> str:
        return f"{self.base}:fence"

    @property
    def door(self) -> str:
        return f"{self.base}:door:{self.attempt}"

    @property
    def token(self) -> str:
        return f"{self.attempt}:{self.epoch}"

    @property
    def prefix(self) -> str:
        return f"{self.base}:{self.epoch}"

    @property
    def index(self) -> str:
        """A set of all data keys, for counting and cleaning."""
        return f"{self.prefix}:index"

    @property
    def done(self) -> str:
        """A hash: each connection slot's last change and its answer, so that a repeated change happens once."""
        return f"{self.prefix}:done"

    @property
    def life(self) -> str:
        """The server's run id under which the epoch's data is whole."""
        return f"{self.prefix}:life"

    def value(self, key: str) -> str:
        """Where the value of a store key lies."""
        return f"{self.prefix}:k:{key}"

    def queue(self, key: str) -> str:
        """Where the queue of a store key lies."""
        return f"{self.prefix}:q:{key}"

    def taken(self, slot: str) -> str:
        """Where an element lies between a queue and the process that takes it."""
        return f"{self.prefix}:t:{slot}"


# KEYS: fence, index, done, then data keys. ARGV: token, slot, number, expiry in ms, operation, arguments.
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
  -- First, for a server without memory refuses a script at its first write only if that needs memory.
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

# KEYS: fence, door. ARGV: attempt, epoch, expiry ms, door's expiry ms, run id.
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

# The server came back without its memory. KEYS: fence, index, done, life, door. ARGV: token, expiry ms, run id, the
# door's value ("" but for the owner of a start that is under way) and expiry ms. The first process to notice clears
# what an old snapshot may have brought back; answers 1 if it was the first.
REVIVE = """
local token = redis.call('GET', KEYS[1])
if token and token ~= ARGV[1] then
  local have = tonumber(string.sub(token, 1, string.find(token, ':', 1, true) - 1))
  local mine = tonumber(string.sub(ARGV[1], 1, string.find(ARGV[1], ':', 1, true) - 1))
  if have >= mine then return redis.error_reply('FENCED ' .. token) end
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
