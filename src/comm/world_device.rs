//! The device and the communicator library of a world: the checks when a process joins the world,
//! and the lines about them in the log.

use std::time::Instant;

use crate::ccl::{Device, Library};
use crate::error::{Error, Result, Status};
use crate::rendezvous::{self, LocalPlace};

/// The release of NCCL that hangs where hosts have different numbers of ranks (nccl#2385).
const HANGS_UNEVEN: i32 = 23_102;

/// Fails where the making of a communicator over the whole world is known not to return. A program
/// that sets `NCCL_HOSTID` has told NCCL of other hosts.
pub(super) fn check_even_hosts(library: &Library, world_size: usize, local: LocalPlace) -> Result<()> {
    let LocalPlace { local_size, num_hosts, .. } = local;
    let is_even = local_size * num_hosts == world_size;
    if library.version() != HANGS_UNEVEN || library.is_rccl() || is_even || is_set("NCCL_HOSTID") {
        return Ok(());
    }
    Err(Error::new(
        Status::Library,
        format!(
            "{} does not return from ncclCommInitRankConfig where hosts have different numbers of ranks (nccl#2385), and this host has {local_size} of {world_size} ranks on {num_hosts} hosts: start as many ranks on each host, or take another release of NCCL",
            library.label()
        ),
    ))
}

/// Fails where the ranks of device type cpu are on several hosts, and the library works within one.
pub(super) fn check_reaches_hosts(library: &Library, local: LocalPlace) -> Result<()> {
    if local.num_hosts == 1 || library.is_engine_for_several_hosts() {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "{} works within one host on device type cpu, but the ranks are on {} hosts: name no library (the embedded host engine works across hosts), or start all ranks on one",
        library.label(),
        local.num_hosts
    )))
}

/// Whether libdevicemesh chooses the device on which `library` makes communicators.
pub(super) fn takes_device(library: &Library) -> bool {
    !library.is_host_engine() && !library.is_rccl()
}

/// Tells the log what this process has joined.
pub(super) fn log_join(world: &rendezvous::World, library: Option<&Library>, device: Option<usize>, began: Instant) {
    if !log::log_enabled!(log::Level::Info) {
        return;
    }
    let device = device.map_or_else(String::new, |device| format!(", device {device}"));
    let library = library.map_or_else(
        || "offline".to_owned(),
        |library| format!("{} at {}, met in {}", library.label(), library.path(), world.store_name()),
    );
    log::info!(
        "rank {}: joined a world of {} ranks in {:.1} ms: launcher {}, local rank {}, device type {}{device}, {library}, libdevicemesh {}",
        world.rank(),
        world.size(),
        began.elapsed().as_secs_f64() * 1e3,
        world.launcher(),
        world.local_rank(),
        world.device_type(),
        env!("CARGO_PKG_VERSION")
    );
}

/// The device that no other rank may have, by its identity, with its name for messages; `None`
/// where ranks may share it.
pub(super) fn exclusive_device(device: &Device) -> Option<(String, String)> {
    let name = format!("device {} of {} on this host", device.number, device.count);
    device.uuid.clone().filter(|_| !may_share_devices()).map(|uuid| (uuid, name))
}

/// Whether the environment lets NCCL put several ranks on one device.
fn may_share_devices() -> bool {
    is_set("NCCL_MULTI_RANK_GPU_ENABLE") || is_set("NCCL_HOSTID")
}

/// Whether a variable of the environment is set, and not to 0.
fn is_set(name: &str) -> bool {
    std::env::var(name).is_ok_and(|value| !value.is_empty() && value != "0")
}
