//! The wire of this process.

use std::net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::Wire;
use super::address::Interface;
use super::tcp::Tcp;
use super::tcp::options::{self, Options};
use super::ucx;
use crate::error::{Error, Result};
use crate::fork;

/// The settings of this process, and its wire.
#[derive(Default)]
struct Here {
    /// The secret that the embedding library has set.
    secret: Option<Vec<u8>>,
    /// The address that the embedding library has set.
    address: Option<IpAddr>,
    /// The wire, for as long as somebody uses it.
    wire: Option<Weak<dyn Wire>>,
}

impl Here {
    /// Whether somebody uses the wire. This function takes no reference to the wire. The drop of
    /// the last reference to a UCX wire waits for the wire's thread, which must not happen while
    /// [`HERE`] is locked.
    fn is_used(&self) -> bool {
        self.wire.as_ref().is_some_and(|wire| wire.strong_count() > 0)
    }
}

static HERE: Mutex<Here> = Mutex::new(Here { secret: None, address: None, wire: None });

/// The function that the wire's thread calls about ten times a second. The function has a lock of
/// its own, because a thread that opens or ends a wire may wait for the wire's thread.
static TICK: Mutex<Option<fn()>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Here> {
    HERE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the wire of this process, and opens it if nobody uses one. `DM_WIRE` says which kind.
pub(crate) fn here() -> Result<Arc<dyn Wire>> {
    if fork::is_child() {
        return Err(Error::usage(fork::refusal()));
    }
    let mut here = lock();
    if let Some(wire) = here.wire.as_ref().and_then(Weak::upgrade) {
        return Ok(wire);
    }
    let kind = kind();
    let wire: Arc<dyn Wire> = match kind.as_str() {
        "" | "tcp" => Tcp::open(Options::read(here.address, secret(&here))?, tick)?,
        "ucx" if secret(&here).is_some() => return Err(ucx::refuse_secret()),
        "ucx" => ucx::open(options::silence()?, tick)?,
        _ => return Err(unknown_kind(&kind)),
    };
    here.wire = Some(Arc::downgrade(&wire));
    Ok(wire)
}

/// Returns the value of `DM_WIRE`.
fn kind() -> String {
    std::env::var_os("DM_WIRE").unwrap_or_default().to_string_lossy().trim().to_owned()
}

fn unknown_kind(kind: &str) -> Error {
    Error::argument(format!("DM_WIRE is {kind:?}: it must be \"tcp\" or \"ucx\""))
}

/// Returns the secret of the job: the secret that was set, or else the secret of the environment.
fn secret(here: &Here) -> Option<Vec<u8>> {
    use std::os::unix::ffi::OsStringExt;
    let from_environment = || std::env::var_os("DM_STORE_SECRET").map(OsStringExt::into_vec);
    here.secret.clone().or_else(from_environment).filter(|secret| !secret.is_empty())
}

/// Returns in words which wire this process would use, and where it would listen. `address` is the
/// address that would be set. Fails with the reason if the wire would be refused. With
/// `DM_WIRE=ucx` this function sets variables of the environment and loads UCX's library, as the
/// start of the wire does.
pub fn describe_wire(address: Option<IpAddr>) -> std::result::Result<String, String> {
    let said = |error: Error| error.message().to_owned();
    describe(&kind(), &Options::read(address, None).map_err(said)?)
}

/// Does what [`describe_wire`] does, for a wire of that kind with these settings.
fn describe(kind: &str, options: &Options) -> std::result::Result<String, String> {
    let said = |error: Error| error.message().to_owned();
    let Interface { name, address, .. } = &options.interface;
    let at = if name.is_empty() { format!("at {address}") } else { format!("at {address} ({name})") };
    match kind {
        "" | "tcp" => {
            // The wire would listen in the same way.
            drop(options.listen().map_err(said)?);
            Ok(format!("TCP {at}"))
        }
        "ucx" if own_secret().is_some() => Err(said(ucx::refuse_secret())),
        "ucx" => Ok(format!("{}, meeting {at}", ucx::describe()?)),
        _ => Err(said(unknown_kind(kind))),
    }
}

/// Returns the secret of the job, with which connections to other hosts are encrypted; `None` where
/// there is none.
pub(crate) fn own_secret() -> Option<Vec<u8>> {
    secret(&lock())
}

/// Returns the address at which this process listens for other hosts. Its port is 0.
pub(crate) fn own_address() -> Result<SocketAddr> {
    let address = lock().address;
    let Interface { address, scope, .. } = Options::read(address, None)?.interface;
    Ok(match address {
        IpAddr::V4(address) => SocketAddr::V4(SocketAddrV4::new(address, 0)),
        IpAddr::V6(address) => SocketAddr::V6(SocketAddrV6::new(address, 0, 0, scope)),
    })
}

/// Sets the secret of the job, with which connections to other hosts are encrypted. `None` leaves
/// it to `DM_STORE_SECRET`. Fails where this process has connected with another secret already.
pub fn set_secret(secret: Option<Vec<u8>>) -> std::result::Result<(), String> {
    let mut here = lock();
    if here.secret != secret && here.is_used() {
        return Err(
            "this process uses connections to other hosts with another secret: end its communicators first".to_owned()
        );
    }
    here.secret = secret;
    Ok(())
}

/// Sets the address at which other hosts reach this process, where no interface is named. Fails
/// where this process listens at another address already.
pub fn set_address(address: Option<IpAddr>) -> std::result::Result<(), String> {
    let mut here = lock();
    if here.address != address && here.is_used() {
        let named =
            |address: Option<IpAddr>| address.map_or("an address of its own choice".to_owned(), |it| it.to_string());
        return Err(format!(
            "this process listens at {} already, and cannot change to {}: end its communicators first",
            named(here.address),
            named(address)
        ));
    }
    here.address = address;
    Ok(())
}

/// Sets the function that the wire's thread calls about ten times a second.
pub(crate) fn on_tick(tick: fn()) {
    *TICK.lock().unwrap_or_else(PoisonError::into_inner) = Some(tick);
}

/// Calls the function of [`on_tick`].
fn tick() {
    let tick = *TICK.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(tick) = tick {
        tick();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_of_a_wire_fails_where_the_wire_would_be_refused() {
        let mut options = Options::of_test();
        assert_eq!(describe("tcp", &options), Ok("TCP at 127.0.0.1 (lo)".to_owned()));
        options.congestion = Some("none such".to_owned());
        let refused = describe("tcp", &options).unwrap_err();
        assert!(refused.contains("DM_SOCKET_CONGESTION is \"none such\""), "{refused}");
        // No interface has this number.
        options.congestion = None;
        (options.interface.address, options.interface.scope) = ("fe80::9".parse().unwrap(), i32::MAX as u32);
        let refused = describe("", &options).unwrap_err();
        assert!(refused.contains("listening at fe80::9"), "{refused}");
    }

    #[test]
    fn a_secret_and_an_address_stay_while_connections_may_use_them() {
        let used = here().unwrap();
        assert_eq!(set_secret(None), Ok(()), "it is the same");
        let refused = set_secret(Some(b"another".to_vec())).unwrap_err();
        assert!(refused.contains("with another secret: end its communicators first"), "{refused}");
        assert_eq!(set_address(None), Ok(()), "it is the same");
        let refused = set_address(Some(IpAddr::from([127, 0, 0, 3]))).unwrap_err();
        assert!(refused.contains("cannot change to 127.0.0.3: end its communicators first"), "{refused}");
        drop(used);
    }
}
