module libdevicemesh/devicemesh

go 1.24
