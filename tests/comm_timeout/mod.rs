//! The timeout of a mesh's communicator, for tests in which only some calls may wait in vain.

use std::time::Duration;

use devicemesh::ccl::RawComm;
use devicemesh::comm::View;

/// Sets how long calls of the first dimension's communicator wait without progress.
pub fn set_comm_timeout(mesh: &View, timeout: Duration) {
    type SetTimeout = unsafe extern "C" fn(RawComm, i64) -> i32;
    // SAFETY: the symbol is the function of that name in the engine's API.
    let set_timeout: SetTimeout = unsafe { std::mem::transmute(mesh.symbol("hostcclCommSetTimeout").unwrap()) };
    // SAFETY: the communicator lives.
    assert_eq!(unsafe { set_timeout(mesh.comm(0).unwrap(), timeout.as_millis() as i64) }, 0);
}
