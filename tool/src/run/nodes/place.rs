//! The words in which messages name the place where the nodes meet.

use std::net::IpAddr;

use crate::run::rendezvous::{Rendezvous, is_loopback};
use crate::words::listed;

/// How many addresses of one name a message lists.
const LISTED: usize = 3;

/// The place of the store.
#[derive(Clone)]
pub struct Place {
    /// "tcp://alpha:29400 (10.0.0.5)": the endpoint, with the addresses that its name has here.
    pub at: String,
    /// The end of messages about nodes that do not come, if only this host reaches the endpoint. If
    /// other hosts may reach it, this is empty.
    pub remark: String,
}

impl Place {
    /// The place of the store whose name has these addresses on this host.
    pub fn new(rendezvous: &Rendezvous, addresses: &[IpAddr]) -> Place {
        let host = &rendezvous.host;
        let is_plain = is_loopback(host) || host.parse::<IpAddr>().is_ok();
        let known = if is_plain { String::new() } else { format!(" ({})", listed(addresses, LISTED)) };
        let is_local = rendezvous.nodes > 1 && addresses.iter().all(IpAddr::is_loopback);
        let remark = match is_local {
            true => format!(
                "; only this host reaches {host}{known}, so nodes on several hosts need another {}",
                if rendezvous.has_service() { "--store" } else { "--rdzv-endpoint" }
            ),
            false => String::new(),
        };
        Place { at: format!("{}{known}", rendezvous.store()), remark }
    }
}
