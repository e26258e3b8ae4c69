#!lua flags=allow-oom
local id, tenant = ARGV[1], ARGV[2]
local session = read_session(id)
if not session or (tenant ~= '' and session[F.tenant] ~= tenant) then return {'missing'} end
if running(session) then touch(id, session) end
return {'ok', session}
