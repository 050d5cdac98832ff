//! The secret that keeps strangers out of a store: client and server prove to each other that they have it, and it never crosses the wire.
//!
//! Each side chooses a nonce; a proof is HMAC-SHA-256 (RFC 2104) keyed with the secret over the side's name and both nonces, so
//! that neither an earlier proof nor the other side's serves again. What follows on the connection is not encrypted.

use hmac::{Hmac, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;

use crate::error::{Error, Result};

/// The environment variable that holds it.
pub const VARIABLE: &str = "DM_STORE_SECRET";

/// Bytes of a nonce.
pub(super) const NONCE: usize = 16;

/// What a client and a server must both have.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// A secret of those bytes; `None` when there are none.
    pub fn new(bytes: &[u8]) -> Option<Secret> {
        (!bytes.is_empty()).then(|| Secret(bytes.to_vec()))
    }

    /// What `DM_STORE_SECRET` holds; `None` where it is not set. It is an error if it is set and empty: who sets it does not want an open store.
    pub fn from_environment() -> Result<Option<Secret>> {
        use std::os::unix::ffi::OsStrExt;
        let Some(value) = std::env::var_os(VARIABLE) else { return Ok(None) };
        Secret::new(value.as_bytes()).map(Some).ok_or_else(|| {
            Error::invalid(format!(
                "{VARIABLE} is set but empty, and an empty secret keeps nobody out: give it a value, the same on all ranks, or unset it"
            ))
        })
    }

    /// An error where `DM_STORE_SECRET` is set: `store` cannot ask anybody for it, and who sets it expects that somebody does.
    pub(crate) fn refuse_for(store: &str) -> Result<()> {
        match Secret::from_environment()? {
            None => Ok(()),
            Some(_) => Err(Error::invalid(format!(
                "{VARIABLE} is set, but {store} does not ask for it: unset it, or meet in a store that does (env:// or tcp://host:port)"
            ))),
        }
    }

    pub(super) fn proof(&self, side: Side, client_nonce: &[u8], server_nonce: &[u8]) -> Vec<u8> {
        self.mac(side, client_nonce, server_nonce).map_or_else(Vec::new, |mac| mac.finalize().into_bytes().to_vec())
    }

    /// Whether it is the other side's proof; takes as long whatever is wrong with it.
    pub(super) fn is_proof(&self, proof: &[u8], side: Side, client_nonce: &[u8], server_nonce: &[u8]) -> bool {
        self.mac(side, client_nonce, server_nonce).is_some_and(|mac| mac.verify_slice(proof).is_ok())
    }

    fn mac(&self, side: Side, client_nonce: &[u8], server_nonce: &[u8]) -> Option<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        mac.update(match side {
            Side::Client => b"devicemesh store client",
            Side::Server => b"devicemesh store server",
        });
        // A server chooses its nonce's length and may see the client's before: lengths keep the two apart.
        for nonce in [client_nonce, server_nonce] {
            mac.update(&(nonce.len() as u64).to_le_bytes());
            mac.update(nonce);
        }
        Some(mac)
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Whose proof.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Client,
    Server,
}

/// Bytes that nobody can guess.
pub(super) fn nonce() -> Result<[u8; NONCE]> {
    let mut nonce = [0; NONCE];
    // So few bytes come whole or not at all.
    match getrandom(&mut nonce, GetRandomFlags::empty()) {
        Ok(_) => Ok(nonce),
        Err(error) => Err(Error::store_io("cannot get random bytes", &error.into())),
    }
}
