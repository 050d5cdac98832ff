//! The secret that keeps strangers out of a store. Client and server prove to each other that they
//! have it, and it never crosses the wire.
//!
//! Each side chooses a nonce. A proof is HMAC-SHA-256 (RFC 2104), keyed with the secret, over the
//! name of the side and both nonces. So neither an earlier proof nor the other side's proof can be
//! used again. What follows on the connection is not encrypted.

use hmac::{Hmac, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;

use crate::error::{Error, Result};

/// The environment variable that holds the secret.
pub const VARIABLE: &str = "DM_STORE_SECRET";

/// The number of bytes of a nonce.
pub(super) const NONCE: usize = 16;

/// The secret that a client and a server must both have.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Makes a secret of these bytes; `None` when there are none.
    pub fn new(bytes: &[u8]) -> Option<Secret> {
        (!bytes.is_empty()).then(|| Secret(bytes.to_vec()))
    }

    /// Returns the secret that `DM_STORE_SECRET` holds; `None` where it is not set. A variable that
    /// is set but empty is an error, because the user does not want an open store.
    pub fn from_environment() -> Result<Option<Secret>> {
        use std::os::unix::ffi::OsStrExt;
        let Some(value) = std::env::var_os(VARIABLE) else { return Ok(None) };
        Secret::new(value.as_bytes()).map(Some).ok_or_else(|| {
            Error::invalid(format!(
                "{VARIABLE} is set but empty, and an empty secret keeps nobody out: give it a value, the same on all ranks, or unset it"
            ))
        })
    }

    /// Returns the secret itself.
    pub(in crate::rendezvous) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Fails where `DM_STORE_SECRET` is set, because `store` cannot ask anybody for the secret, and
    /// the user expects that it does.
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

    /// Whether this is the other side's proof. The comparison takes equally long wherever the proof
    /// is wrong.
    pub(super) fn is_proof(&self, proof: &[u8], side: Side, client_nonce: &[u8], server_nonce: &[u8]) -> bool {
        self.mac(side, client_nonce, server_nonce).is_some_and(|mac| mac.verify_slice(proof).is_ok())
    }

    fn mac(&self, side: Side, client_nonce: &[u8], server_nonce: &[u8]) -> Option<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        mac.update(match side {
            Side::Client => b"devicemesh store client",
            Side::Server => b"devicemesh store server",
        });
        // A server chooses the length of its nonce and may see the client's nonce before, so the
        // lengths are part of the text.
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

/// The side that proves that it has the secret.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Client,
    Server,
}

/// Returns the number by which a connection whose challenge had this nonce is known.
pub(super) fn number_of(nonce: &[u8]) -> u32 {
    nonce.first_chunk().map_or(0, |first| u32::from_le_bytes(*first))
}

/// Returns bytes that nobody can guess.
pub(super) fn nonce() -> Result<[u8; NONCE]> {
    let mut nonce = [0; NONCE];
    // So few bytes come whole or not at all.
    match getrandom(&mut nonce, GetRandomFlags::empty()) {
        Ok(_) => Ok(nonce),
        Err(error) => Err(Error::store_io("cannot get random bytes", &error.into())),
    }
}
