-- The authority for limits that daemons share: what one call of a daemon does in one partition, atomically.
--
-- The permits of a counter are leased to daemons as rights. All rights together are never more than the counter's
-- maximum, so a daemon grants from its rights without asking. It says in absolute numbers what it has and wants, so a
-- call that is made twice changes nothing. All times are the server's, in milliseconds.
--
-- A daemon has a counter's rights in one of two modes. PLENTY: it may have more than it uses, and grants from them to
-- requests with the counter's maximum. EXACT: it has what it uses, and asks here for each request. While any daemon
-- has plenty, all rights together are at most the maximum for which that was given.
--
-- A daemon whose request is refused, and stays, has a place in a line. The first one's request has to fit after
-- everything that others are given. A place is kept by asking again. A request that does not stay gets no place, but
-- the others know for a while that it was refused, so that they give back what they can.
--
-- A rate has no rights: the units that are granted are used up. What a daemon did not use it may give back.
--
-- KEYS: leases, meta, totals, waited, and the caller's block. All keys of a partition are in one slot.
--   leases         a sorted set: when each daemon's lease ends
--   meta           a hash: the history of the data, when the last recovery ends (`learns`), the longest lease so far,
--                  refusals so far, and each daemon's last call
--   totals         a hash by name: a TOTAL of a counter
--   waited         a sorted set: names of counters, and when requests for them were last refused
--   block:DAEMON   a hash by name: a SHARE
--   line:NAME      a sorted set: daemons that wait for rights of a counter, in the order of their first refusals
--   rate:NAME      a FILL
--
-- A server that has just become the master, or was started, may not know what was granted before. Its replication ID is
-- another one then, even if it was the master before, and has been a replica only for a moment. It recovers for one
-- lease: daemons may keep what they say they have, and nobody is given more. By then each daemon has reported all from
-- which it still grants.

-- All numbers are doubles, as Lua's are: they are exact up to 2^53.
local TOTAL = '<ddddddd'   -- all rights, those that are plenty, all use, the maximum for which plenty was given, daemons
                           -- in line, last refusal without a place, last one of another daemon
local SHARE = '<dddddd'    -- rights, use, mode, what it needs, of which maximum, last refusal
local REQUEST = '<ddddddd'    -- see decide()
local GRANT = '<ddddd'     -- likewise
local FILL = '<ddd'        -- see pour()
local PLENTY, EXACT = 0, 1
local STALE, LOST, DONE = 0, 1, 2
local REAPED_MAX = 500     -- counters that are taken back in one call
local WAITED_MAX = 32      -- names that are told in one answer
local AGAIN_MS = 0.5       -- for each daemon: so all together ask at most 2,000 times a second again
local AGAIN_LEAST_MS = 5
local SPAN_MAX_US = 316224e9   -- ten years, as in the daemons' stores: nothing of a rate takes longer
local PLACE_MS = 200       -- and twice the above: a daemon that did not ask again for so long has lost its place

local function read(format, packed)
  if packed then
    return struct.unpack(format, packed)
  end
  return 0, 0, 0, 0, 0, 0, 0
end

-- Takes back what an expired daemon has, a part in each call. Forgets the daemon when it has nothing left.
local function take_back(prefix, leases, meta, totals, daemon)
  local block = prefix .. 'block:' .. daemon
  local found = redis.call('HRANDFIELD', block, REAPED_MAX, 'WITHVALUES')
  for index = 1, #found, 2 do
    local name = found[index]
    local rights, used, mode, need = read(SHARE, found[index + 1])
    local all, plenty, use, maximum, waiting, refused, other = read(TOTAL, redis.call('HGET', totals, name))
    if need > 0 then
      waiting = waiting - redis.call('ZREM', prefix .. 'line:' .. name, daemon)
    end
    all, use = all - rights, use - used
    if all == 0 and use == 0 and waiting == 0 then
      redis.call('HDEL', totals, name)
    else
      plenty = plenty - (mode == PLENTY and rights or 0)
      redis.call('HSET', totals, name, struct.pack(TOTAL, all, plenty, use, maximum, waiting, refused, other))
    end
    redis.call('HDEL', block, name)
  end
  if redis.call('EXISTS', block) == 0 then
    redis.call('ZREM', leases, daemon)
    redis.call('HDEL', meta, 'call:' .. daemon)
  end
end

-- Returns the first daemon in a line, its rights, what it needs and of which maximum, and how many have lost their
-- places meanwhile.
local function first_in(call, line)
  local gone = 0
  while true do
    local first = redis.call('ZRANGE', line, 0, 0)[1]
    if not first or first == call.daemon then
      return first, 0, 0, 0, gone
    end
    local block = call.prefix .. 'block:' .. first
    local rights, used, mode, need, maximum, refused = read(SHARE, redis.call('HGET', block, call.name))
    if call.now - refused <= call.place then
      return first, rights, need, maximum, gone
    end
    redis.call('ZREM', line, first)
    redis.call('HSET', block, call.name, struct.pack(SHARE, rights, used, mode, 0, 0, refused))
    gone = gone + 1
  end
end

-- Decides about one counter, call.name. share, total: what is known of it, packed, or false. request: packed:
--   maximum  of the client's request, or of the rights
--   least    what the daemon uses, and what the first client that waits there needs
--   want     what it would like to have, at least `least`
--   keep     what it may be using when this is answered, as it goes on granting from so much; at most `want`
--   used     what it uses
--   mode     the one it asks for
--   stays    1 if the client waits on when it is refused
-- Returns a GRANT: the daemon's rights, its mode, all rights, all use, and 1 if other daemons wait; and the new share
-- and total, or false.
local function decide(call, share, total, request)
  local maximum, least, want, keep, used, mode, stays = struct.unpack(REQUEST, request)
  local rights, used_before, mode_before, need_before, _, refused_before = read(SHARE, share)
  local all, plenty, use, plenty_maximum, waiting, refused, other = read(TOTAL, total)
  local others, others_plenty = all - rights, plenty - (mode_before == PLENTY and rights or 0)
  local line = call.prefix .. 'line:' .. call.name
  local first, their_rights, need, their_maximum, gone
  if waiting > 0 then
    first, their_rights, need, their_maximum, gone = first_in(call, line)
    -- While its slot is moved, a script can end in the middle, and the number be wrong.
    waiting = first and math.max(waiting - gone, 1) or 0
  end
  local is_first = not first or first == call.daemon
  local stands = rights   -- what it can go on to have
  if call.is_recovering then
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

  local room = call.is_recovering and 0 or limit - others
  if not is_first then    -- the first one's request has to fit afterwards
    room = math.min(room, their_maximum - others) - math.max(need - their_rights, 0)
    if mode_before == EXACT and rights > room and not call.is_recovering then
      mode = EXACT    -- as plenty for this maximum they would leave no room for the first one's request
    end
  end
  local most = math.max(limit - others, keep)  -- of rights for this maximum
  local granted = math.min(want, math.max(stands, room), most)
  local waits = granted < least
  if waits then
    granted = math.min(stands, least, most)
  end
  if not waits then
    used = least    -- by its first request, when it has the answer
  end
  if others + granted > limit then    -- as it may be if others have a larger maximum, or after a failover
    mode = EXACT
  end
  local has_place = waits and stays == 1
  if has_place and need_before == 0 then
    redis.call('ZADD', line, redis.call('HINCRBY', call.meta, 'refusals', 1), call.daemon)
    waiting = waiting + 1
  elseif need_before > 0 and not has_place then
    redis.call('ZREM', line, call.daemon)
    waiting = waiting - 1
  end
  if waits then
    call.refused[#call.refused + 1] = math.floor(call.now)
    call.refused[#call.refused + 1] = call.name
    if not has_place then
      if refused ~= refused_before then
        other = refused
      end
      refused = call.now
    end
    refused_before = call.now
  end

  all, use = others + granted, use - used_before + used
  plenty = others_plenty + (mode == PLENTY and granted or 0)
  if mode == PLENTY then
    plenty_maximum = maximum
  end
  local last = refused == refused_before and other or refused
  local others_wait = waiting > (has_place and 1 or 0) or call.now - last <= call.place
  local answer = struct.pack(GRANT, granted, mode, all, use, others_wait and 1 or 0)
  share = (granted > 0 or used > 0 or has_place)
    and struct.pack(SHARE, granted, used, mode, has_place and least or 0, has_place and maximum or 0, refused_before)
  total = (all > 0 or use > 0 or waiting > 0)
    and struct.pack(TOTAL, all, plenty, use, plenty_maximum, waiting, refused, other)
  return answer, share, total
end

-- Writes what has changed of a hash. Both tables are packed numbers by the index of the name, or false.
local function write(key, names, before, after)
  local changed, gone = {}, {}
  for index, name in ipairs(names) do
    if after[index] and after[index] ~= before[index] then
      changed[#changed + 1] = name
      changed[#changed + 1] = after[index]
    elseif before[index] and not after[index] then
      gone[#gone + 1] = name
    end
  end
  if #changed > 0 then
    redis.call('HSET', key, unpack(changed))
  end
  if #gone > 0 then
    redis.call('HDEL', key, unpack(gone))
  end
end

-- Decides about counters. Returns a GRANT for each, in one string.
local function grant(call, names, requests, totals, block)
  local shares, known = redis.call('HMGET', block, unpack(names)), redis.call('HMGET', totals, unpack(names))
  local grants, new_shares, new_totals = {}, {}, {}
  for index, name in ipairs(names) do
    call.name = name
    grants[index], new_shares[index], new_totals[index] = decide(call, shares[index], known[index], requests[index])
  end
  write(block, names, shares, new_shares)
  write(totals, names, known, new_totals)
  return table.concat(grants)
end

-- What `units` units of a rate take, at most SPAN_MAX_US: microseconds, and a part of one in 1/limit. For less than 2^32
-- units and a limit below 2^31, no product is above 2^53 in a span that is not too long.
local function span_of(units, limit, period)
  local rest = period % limit
  local high, low = math.floor(units / 65536), units % 65536
  local product = high * rest
  local parts = product % limit * 65536 + low * rest
  local us = units * ((period - rest) / limit) + (product - product % limit) / limit * 65536
  us = us + (parts - parts % limit) / limit
  if us >= SPAN_MAX_US then
    return SPAN_MAX_US, 0
  end
  return us, parts % limit
end

-- Decides about one rate. Its FILL is the moment from which on all units are there, in microseconds and in parts of
-- one, and the limit that says what a part is. request: packed:
--   limit   units in a period
--   period  in microseconds
--   burst   units that are there after long idleness
--   least   what the first client that waits needs, at most the burst
--   want    at least `least`
--   give    what the daemon gives back; negative: what it used without having been granted it
-- Returns the units that are granted, none or at least `least`, and the microseconds until `least` are there, or 0.
local function pour(key, now, request)
  local limit, period, burst, least, want, give = struct.unpack('<dddddd', request)
  if limit == 0 then    -- The request ended before its units arrived; we no longer know its rate.
    return struct.pack('<dd', 0, 0)
  end
  want = math.min(want, burst)    -- many may wait, and all units that are longer than any span take equally long
  local us, part, of = read(FILL, redis.call('GET', key))
  if of ~= limit then
    us, part = us + math.ceil(part / limit), 0
  end
  local function move(units)    -- of what is in use
    local more_us, more_part = span_of(math.abs(units), limit, period)
    local sign = units < 0 and -1 or 1
    us, part = us + sign * more_us, part + sign * more_part
    if part < 0 or part >= limit then
      us, part = us + sign, part - sign * limit
    end
  end
  local function fill()    -- there is never more than the burst, and no debt is longer than any span
    if us < now then
      us, part = now, 0
    elseif us >= now + SPAN_MAX_US then
      us, part = now + SPAN_MAX_US, 0
    end
  end
  fill()
  move(-give)
  fill()
  local all_us, all_part = span_of(burst, limit, period)
  local function wait(units)    -- until so many are there
    local more_us, more_part = span_of(units, limit, period)
    return us + more_us - now - all_us + (part + more_part - all_part) / limit
  end
  local granted = want
  if wait(want) > 0 then    -- as many as are there: about, and then exactly
    granted = math.max(math.min(math.floor(-wait(0) / period * limit), want), 0)
    while granted > 0 and wait(granted) > 0 do
      granted = granted - 1
    end
    while wait(granted + 1) <= 0 do
      granted = granted + 1
    end
  end
  local wait_us = 0
  if granted < least then
    granted, wait_us = 0, math.min(math.ceil(wait(least)), SPAN_MAX_US)
  end
  move(granted)
  if us > now or part > 0 then
    redis.call('SET', key, struct.pack(FILL, us, part, limit), 'PX', string.format('%d', (us - now) / 1000 + 1))
  else
    redis.call('DEL', key)
  end
  return struct.pack('<dd', granted, wait_us)
end

-- Returns when the recovery of this server ends, or ended. known: of meta: the history, that end, the longest lease.
local function begin(meta, leases, known, now, lease)
  local longest = tonumber(known[3] or 0)
  if lease > longest then
    longest = lease
    redis.call('HSET', meta, 'longest', longest)
  end
  local recovered = tonumber(known[2] or 0)
  local history = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
  if known[1] ~= history or recovered > now + longest then    -- the clock may have been set back
    recovered = now + longest
    redis.call('HSET', meta, 'history', history, 'learns', recovered)
    -- Its clock may be another one. No lease goes on without being renewed meanwhile.
    for _, daemon in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. string.format('%.17g', recovered), '+inf')) do
      redis.call('ZADD', leases, recovered, daemon)
    end
  end
  return recovered
end

-- Says that requests were refused. Returns counters of which others wait for rights.
local function tell_waited(call, waited, now)
  if #call.refused > 0 then
    redis.call('ZADD', waited, unpack(call.refused))
    redis.call('ZREMRANGEBYSCORE', waited, '-inf', now - call.place)
    redis.call('PEXPIRE', waited, call.place)
  end
  return redis.call('ZREVRANGEBYSCORE', waited, '+inf', now - call.place, 'LIMIT', 0, WAITED_MAX)
end

-- One call of a daemon. ARGV: the daemon's name; the number of its call; the lease in milliseconds, 0 to end it; how
-- many counters follow; a name and a request for each; and the same for rates. A name is there once.
-- Returns {STALE} if a later call was made, {LOST} if its lease was over, so that it has nothing any more, or
-- {DONE, milliseconds for which this server still recovers, the end of its last recovery, daemons with a lease or its
-- rests, milliseconds after which to ask again for what was refused, counters to which somebody waits for rights, what
-- decide() returns, what pour() returns}.
local function tick(KEYS, ARGV)
  local leases, meta, totals, waited, block = unpack(KEYS)
  local prefix = string.sub(leases, 1, -#'leases' - 1)
  local daemon, number, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)

  local known = redis.call('HMGET', meta, 'history', 'learns', 'longest', 'call:' .. daemon)
  if number <= tonumber(known[4] or 0) then
    return {STALE}
  end
  if lease == 0 then
    redis.call('ZADD', leases, 'XX', now, daemon)
    return {DONE, 0, 0, 0, 0, {}, '', ''}
  end
  local recovered = begin(meta, leases, known, now, lease)
  local recovering = math.max(recovered - now, 0)
  if recovering == 0 then    -- else the server may only have forgotten that leases were renewed
    local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 1)[1]
    if expired then
      take_back(prefix, leases, meta, totals, expired)
    end
    local ends = redis.call('ZSCORE', leases, daemon)
    if ends and tonumber(ends) <= now or not ends and number > 1 then
      return {LOST}
    end
  end
  redis.call('ZADD', leases, now + lease, daemon)
  redis.call('HSET', meta, 'call:' .. daemon, number)

  local daemons = redis.call('ZCARD', leases)
  local again = math.max(math.ceil(daemons * AGAIN_MS), AGAIN_LEAST_MS)
  local call = {
    daemon = daemon, prefix = prefix, meta = meta, is_recovering = recovering > 0, place = PLACE_MS + 2 * again,
    refused = {},
    now = now + time[2] % 1000 / 1000,    -- so exactly that it is the time of no other call
  }
  local names, requests = {}, {}
  local rates = 5 + 2 * tonumber(ARGV[4])
  for index = 5, rates - 1, 2 do
    names[#names + 1], requests[#requests + 1] = ARGV[index], ARGV[index + 1]
  end
  local grants = #names > 0 and grant(call, names, requests, totals, block) or ''
  local units = {}
  for index = rates, #ARGV, 2 do
    local us = time[1] * 1000000 + time[2]
    units[#units + 1] = pour(prefix .. 'rate:' .. ARGV[index], us, ARGV[index + 1])
  end
  local names_waited = tell_waited(call, waited, now)
  return {DONE, math.ceil(recovering), recovered, daemons, again, names_waited, grants, table.concat(units)}
end
