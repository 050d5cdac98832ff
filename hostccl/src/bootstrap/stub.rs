//! Stands in for the address and the wire of this process, until `wire::here` and `wire::address`
//! are there.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::error::Result;
use crate::event::{self, Event, Watch};
use crate::token::random_token;
use crate::wire::{Broken, Contact, Lost, Notice, Peer, Request, Tag, Token, Wire};

pub(crate) fn own_address() -> Result<SocketAddr> {
    Ok(SocketAddr::from(([127, 0, 0, 1], 0)))
}

pub(crate) fn secret() -> Option<Vec<u8>> {
    std::env::var_os("DM_STORE_SECRET").map(std::os::unix::ffi::OsStringExt::into_vec).filter(|it| !it.is_empty())
}

pub(crate) fn here() -> Result<Arc<dyn Wire>> {
    static HERE: OnceLock<Arc<Silent>> = OnceLock::new();
    let id = random_token()?;
    Ok(HERE.get_or_init(|| Arc::new(Silent { id, moved: Event::default() })).clone())
}

#[derive(Debug)]
struct Silent {
    id: [u8; 16],
    moved: Event,
}

fn silent() -> Lost {
    Lost { ended: false, why: "there is no wire yet".to_owned() }
}

impl Wire for Silent {
    fn contact(&self) -> Contact {
        Contact { id: self.id, address: Vec::new() }
    }
    fn meet(&self, _: &Contact, _: &Token) -> Peer {
        Peer(0)
    }
    fn close(&self, _: Peer) {}
    unsafe fn isend(&self, _: Peer, _: Tag, _: *const u8, _: usize) -> Request {
        Request(0)
    }
    unsafe fn irecv(&self, _: Peer, _: Tag, _: *mut u8, _: usize) -> Request {
        Request(0)
    }
    fn test(&self, _: &Request) -> std::result::Result<Option<usize>, Broken> {
        Err(Broken::Lost(silent()))
    }
    fn cancel(&self, _: Request) {}
    fn notify(&self, _: Peer, _: u64, _: &[u8]) {}
    fn news(&self) -> (Vec<Notice>, Vec<(Peer, Lost)>) {
        (Vec::new(), Vec::new())
    }
    fn lost(&self, _: Peer) -> Option<Lost> {
        None
    }
    fn waiting(&self, _: Peer, _: u64) -> Vec<Tag> {
        Vec::new()
    }
    fn progress(&self) -> bool {
        false
    }
    fn moved(&self) -> &Event {
        &self.moved
    }
    fn sleep(&self, watches: &[Watch<'_>], timeout: Duration) {
        event::sleep(watches, timeout);
    }
}
