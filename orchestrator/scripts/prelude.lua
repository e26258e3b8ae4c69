-- What every script shares. __init__.py puts it behind the first line of each, after the tables
-- KEY, LIFE, FIELDS and F.

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

local TERMINAL = {completed = true, timed_out = true, cancelled = true, failed = true}

local function key(name, part)
  return string.format(KEY[name], part)
end

-- Redis cuts a number in a reply to an integer and Lua prints 14 digits, so instants are text.
local function instant(seconds)
  return string.format('%.6f', seconds)
end

local function read_session(id)
  local session = redis.call('HMGET', key('session', id), unpack(FIELDS))
  if not session[F.tenant] then return nil end
  return session
end

local function running(session)
  return session[F.status] == 'running'
end

-- A record starts with its status: `completed json {...}`.
local function finished(record)
  return TERMINAL[string.match(record, '^%S+')]
end

-- Places in a list never repeat, not even after the newest entry was removed.
local function next_position(order)
  local last = redis.call('ZREVRANGE', order, 0, 0, 'WITHSCORES')[2]
  local position = tonumber(time[1]) * 1000000 + tonumber(time[2])
  if last and tonumber(last) >= position then position = tonumber(last) + 1 end
  return string.format('%.0f', position)
end

-- A client that deletes what it lists goes on from an id that is gone.
local function remember_position(cursors, id, position)
  redis.call('ZADD', cursors, position, id)
  redis.call('ZREMRANGEBYRANK', cursors, 0, -LIFE.cursors_kept - 1)
  redis.call('EXPIRE', cursors, LIFE.cursor)
end

-- The session is due when it is idle or too old, and no unfinished execution holds it.
local function set_deadline(id, session)
  local due = tonumber(session[F.idle_expires_at])
  local hold = redis.call('ZREVRANGE', key('unfinished', id), 0, 0, 'WITHSCORES')[2]
  if hold and tonumber(hold) > due then due = tonumber(hold) end
  redis.call('ZADD', KEY.deadlines, instant(due), id)
end

local function touch(id, session)
  local idle_end = now + tonumber(session[F.idle_minutes]) * 60
  local expires_at = tonumber(session[F.expires_at])
  if expires_at and expires_at < idle_end then idle_end = expires_at end
  session[F.last_active_at] = instant(now)
  session[F.idle_expires_at] = instant(idle_end)
  redis.call('HSET', key('session', id),
    'last_active_at', session[F.last_active_at],
    'idle_expires_at', session[F.idle_expires_at])
  set_deadline(id, session)
end

-- Keys made after the session's end get what is left of its time.
local function expire_with_session(id, ...)
  local left = redis.call('PTTL', key('session', id))
  if left > 0 then
    for _, name in ipairs({...}) do
      redis.call('PEXPIRE', key(name, id), left)
    end
  end
end

-- A page of ids by position: at most one more than `limit`, which tells that there are more.
-- nil: the cursor is unknown.
local function page(order, cursors, after, limit, direction)
  local bound
  if after ~= '' then
    local position = redis.call('ZSCORE', order, after)
      or (cursors and redis.call('ZSCORE', cursors, after))
    if not position then return nil end
    bound = '(' .. position
  end
  if direction == 'asc' then
    return redis.call('ZRANGEBYSCORE', order, bound or '-inf', '+inf', 'LIMIT', 0, limit + 1)
  end
  return redis.call('ZREVRANGEBYSCORE', order, bound or '+inf', '-inf', 'LIMIT', 0, limit + 1)
end
