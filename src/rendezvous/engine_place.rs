//! Finds out whether the ranks of device type cpu share memory, and tells the host engine of this
//! process how ranks on other hosts reach it.

use std::net::IpAddr;

use hostccl::machine;

use super::host::HostIdentity;
use super::store::{Secret, Server, Store};
use crate::error::{Error, Result};
use crate::logging::Me;

/// The place of this process's host engine, as other ranks see it. The place is found before the
/// ranks agree on the join.
pub(super) struct EnginePlace {
    /// A text that is equal on two ranks only if they may share memory.
    host: String,
    /// The address of this host at which ranks on other hosts may reach this process: the local
    /// address of the connection to the store. `None` where the store has no address.
    address: Option<IpAddr>,
}

/// A rank whose address is a loopback address offers this word. When all ranks offer the word, all
/// of them are in one network namespace.
const LOOPBACK: &str = "loopback";

impl EnginePlace {
    /// Finds the place of this process. `server` is the store's server if this process runs it.
    pub(super) fn here(store: &dyn Store, server: Option<&Server>) -> Result<EnginePlace> {
        if let Some(why) = machine::broken_proc() {
            return Err(Error::unsupported(why));
        }
        let host = HostIdentity::of_memory().map_err(|error| {
            let message = format!("finding out which machine this is: {}", machine::explained(&error));
            Error::unsupported(message).with_os_error(error.raw_os_error().unwrap_or(0))
        })?;
        let address = store.local_address().map(|address| {
            // Rank 0 may reach its own server by a loopback address, and the others by another
            // one.
            let served = server.filter(|_| address.is_loopback()).and_then(Server::address_for_others);
            served.unwrap_or(address)
        });
        Ok(EnginePlace { host: host.id, address })
    }

    /// Returns what this rank offers to share with the others: the memory of its host, and the
    /// loopback addresses of its network namespace.
    pub(super) fn offers(&self) -> Vec<Option<String>> {
        let is_loopback = self.address.is_some_and(|address| address.is_loopback());
        vec![Some(self.host.clone()), is_loopback.then(|| LOOPBACK.to_owned())]
    }

    /// Returns a text that is equal on the ranks of one host, and on no others.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Tells the host engine the address of this process, and the secret of the job. This function
    /// is called where the ranks are on several hosts. `is_one_network` says that all ranks reach
    /// each other by loopback addresses.
    pub(super) fn introduce(&self, is_one_network: bool) -> Result<()> {
        let address = self.address.filter(|address| is_one_network || !address.is_loopback());
        log::debug!(
            "{Me}: the host engine meets other hosts at {}",
            address.map_or_else(|| "an address of its own choice".to_owned(), |address| address.to_string())
        );
        // Where an earlier world uses the engine's connections already, the other ranks reach this
        // process at the address of that world.
        if let Err(why) = hostccl::set_address(address) {
            log::debug!("{Me}: {why}");
        }
        let secret = Secret::from_environment()?.map(|secret| secret.bytes().to_vec());
        hostccl::set_secret(secret).map_err(|why| Error::invalid_state(format!("DM_STORE_SECRET: {why}")))
    }
}
