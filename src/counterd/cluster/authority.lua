-- The authority for limits that sidecars share: what one call of a sidecar does in one partition, atomically.
--
-- The permits of a counter are leased to sidecars as rights. All rights together are never more than the counter's
-- maximum, so a sidecar grants from its rights without asking. It says in absolute numbers what it has and wants, so a
-- call that is made twice changes nothing. All times are the server's, in milliseconds.
--
-- A sidecar has a counter's rights in one of two modes. PLENTY: it may have more than it uses, and grants from them to
-- requests with the counter's maximum. EXACT: it has what it uses, and asks here for each request. While any sidecar
-- has plenty, nothing is granted above the maximum for which that was given.
--
-- KEYS: leases, meta, counters, and the caller's block. All keys of a partition are in one slot.
--   leases         a sorted set: when each sidecar's lease ends
--   meta           a hash: the run of the server that made the last call, the end of its learning, refusals so far, and
--                  each sidecar's last call
--   counters       a hash by name: all rights, those that are plenty, all use, and the maximum for which plenty was
--                  given
--   block:SIDECAR  a hash by name: the sidecar's rights, its use and its mode; if it waits, the rights it needs, and of
--                  which maximum
--   line:NAME      a sorted set: sidecars that wait for rights of a counter, in the order of their first refusals
--
-- A server that has just become the master, or was started, may not know what was granted before. Its run is another
-- one. It then learns for one lease: sidecars may keep what they say they have, and nobody is given more. What no
-- sidecar has said by then, no sidecar grants from any more.

local PLENTY, EXACT = 0, 1
local STALE, LOST, DONE = 0, 1, 2
local ENTRY = 7            -- arguments of a counter
local REAPED_MAX = 500     -- counters that are taken back in one call

local function load(key, name, count)
  local found = {}
  for each in string.gmatch(redis.call('HGET', key, name) or '', '%S+') do
    found[#found + 1] = tonumber(each)
  end
  for index = #found + 1, count do
    found[index] = 0
  end
  return unpack(found)
end

local function store(key, name, ...)
  local numbers = {...}
  for index, each in ipairs(numbers) do
    numbers[index] = string.format('%d', each)
  end
  redis.call('HSET', key, name, table.concat(numbers, ' '))
end

-- Takes back what an expired sidecar has, a part in each call. Forgets the sidecar when it has nothing left.
local function take_back(prefix, leases, meta, counters, sidecar)
  local block = prefix .. 'block:' .. sidecar
  local found = redis.call('HRANDFIELD', block, REAPED_MAX, 'WITHVALUES')
  for index = 1, #found, 2 do
    local name = found[index]
    local rights, used, mode = load(block, name, 4)
    local all, plenty, use, maximum = load(counters, name, 4)
    if all == rights and use == used then
      redis.call('HDEL', counters, name)
    else
      store(counters, name, all - rights, plenty - (mode == PLENTY and rights or 0), use - used, maximum)
    end
    redis.call('HDEL', block, name)
    redis.call('ZREM', prefix .. 'line:' .. name, sidecar)
  end
  if redis.call('EXISTS', block) == 0 then
    redis.call('ZREM', leases, sidecar)
    redis.call('HDEL', meta, 'call:' .. sidecar)
  end
end

-- Decides about one counter. maximum: of the request, or of the rights. least: what the sidecar uses and what its
-- first request needs. want: what it would like to have, at least `least`. keep: what it may be using when this is
-- answered, as it goes on granting from so much; at most `want`. used: what it uses. mode: the one it asks for.
-- Returns its rights, its mode, all rights, all use, and 1 if any sidecar waits.
local function decide(prefix, meta, counters, block, sidecar, learns, name, maximum, least, want, keep, used, mode)
  local line = prefix .. 'line:' .. name
  local rights, used_before, mode_before = load(block, name, 4)
  local all, plenty, use, plenty_maximum = load(counters, name, 4)
  local others, others_plenty = all - rights, plenty - (mode_before == PLENTY and rights or 0)
  local first = redis.call('ZRANGE', line, 0, 0)[1]
  local is_first = not first or first == sidecar
  local stands = rights   -- what it can go on to have
  if learns then
    stands = keep
  elseif not is_first then
    stands = math.min(rights, keep)
  end
  local limit = maximum
  if others_plenty > 0 and plenty_maximum ~= maximum then
    limit, mode = math.min(maximum, plenty_maximum), EXACT
  end
  if mode == EXACT or not is_first then
    want = math.max(least, keep)
  end

  local room = learns and 0 or limit - others
  if not is_first then    -- the first one's request has to fit afterwards
    local their_rights, _, _, need, their_maximum = load(prefix .. 'block:' .. first, name, 5)
    room = math.min(room, their_maximum - others) - math.max(need - their_rights, 0)
  end
  local most = math.max(limit - others, keep)  -- of rights for this maximum
  local granted = math.min(want, math.max(stands, room), most)
  local waits = granted < least
  if waits then
    granted = math.min(stands, is_first and least or keep, most)
    redis.call('ZADD', line, 'NX', redis.call('HINCRBY', meta, 'refusals', 1), sidecar)
  else
    redis.call('ZREM', line, sidecar)
  end

  if granted == 0 and used == 0 and not waits then
    redis.call('HDEL', block, name)
  else
    store(block, name, granted, used, mode, waits and least or 0, waits and maximum or 0)
  end
  all, use = others + granted, use - used_before + used
  plenty = others_plenty + (mode == PLENTY and granted or 0)
  if mode == PLENTY then
    plenty_maximum = maximum
  end
  if all == 0 and use == 0 then
    redis.call('HDEL', counters, name)
  else
    store(counters, name, all, plenty, use, plenty_maximum)
  end
  return granted, mode, all, use, redis.call('EXISTS', line)
end

-- One call of a sidecar. ARGV: the sidecar; the number of its call; the run of this server; the lease in milliseconds;
-- and the arguments of decide() for each counter, whose last, the mode, is 0 or 1. Returns {STALE} if a later call was
-- made, {LOST} if its lease was over, so that it has nothing any more, or
-- {DONE, milliseconds that this server still learns, and for each counter what decide() returns}.
local function tick(KEYS, ARGV)
  local leases, meta, counters, block = unpack(KEYS)
  local prefix = string.sub(leases, 1, -#'leases' - 1)
  local sidecar, call, run, lease = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)

  if redis.call('HGET', meta, 'run') ~= run then
    redis.call('HSET', meta, 'run', run, 'learns', string.format('%d', now + lease))
  end
  local learning = math.max(tonumber(redis.call('HGET', meta, 'learns')) - now, 0)
  local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 1)[1]
  if expired and learning == 0 then    -- while it learns, the server may only have forgotten that leases were renewed
    take_back(prefix, leases, meta, counters, expired)
  end

  if call <= tonumber(redis.call('HGET', meta, 'call:' .. sidecar) or 0) then
    return {STALE}
  end
  local ends = redis.call('ZSCORE', leases, sidecar)
  if learning == 0 and (ends and tonumber(ends) <= now or not ends and call > 1) then
    return {LOST}
  end
  redis.call('ZADD', leases, now + lease, sidecar)
  redis.call('HSET', meta, 'call:' .. sidecar, call)
  local answer = {DONE, learning}
  for index = 5, #ARGV, ENTRY do
    local arguments = {}
    for at = 1, ENTRY - 1 do
      arguments[at] = tonumber(ARGV[index + at])
    end
    local decided = {decide(prefix, meta, counters, block, sidecar, learning > 0, ARGV[index], unpack(arguments))}
    for _, each in ipairs(decided) do
      answer[#answer + 1] = each
    end
  end
  return answer
end
