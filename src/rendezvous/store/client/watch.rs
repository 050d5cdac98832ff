//! Questions that are left open at the server: a WAIT whose answer nobody waits for.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::super::KeyWatch;
use super::super::connection::{Connection, ExchangeError};
use super::super::frame::op;
use super::{TcpStore, full, with_keys};
use crate::error::{Error, Result};
use crate::wait::Wait;

/// An open WAIT for one key, on a connection of its own.
struct OpenWait {
    /// The connection; `None` when the question is over.
    connection: Option<Connection>,
    /// The store's connections that no call uses. The connection goes back there when the answer
    /// has come, because the server takes this process for gone when its last connection ends.
    idle: Arc<Mutex<Vec<Connection>>>,
    /// The name of the store, for messages.
    name: String,
}

impl TcpStore {
    /// Sends WAIT for the key, and leaves it unanswered.
    pub(super) fn leave_open(&self, key: &str, wait: &Wait) -> Result<Box<dyn KeyWatch>> {
        let mut connection = self.take(wait)?;
        let request = with_keys(op::WAIT, &[full(key)]);
        if let Err(broken) = connection.send(&request, wait) {
            return Err(self.explain(broken, connection.nonce, &format!("WAIT {key}"), wait));
        }
        let (idle, name) = (Arc::clone(&self.idle), self.address.name.clone());
        Ok(Box::new(OpenWait { connection: Some(connection), idle, name }))
    }
}

impl KeyWatch for OpenWait {
    fn has_come(&mut self) -> Result<bool> {
        let over = || Error::store(format!("the store at {} has closed the connection of an open WAIT", self.name));
        let connection = self.connection.as_mut().ok_or_else(over)?;
        // The socket does not block, and the deadline has passed: this is one read.
        match connection.byte(&Wait::after(Duration::ZERO)) {
            Ok(_) => {
                let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
                idle.extend(self.connection.take());
                Ok(true)
            }
            Err(ExchangeError::Late) => Ok(false),
            Err(broken) => {
                self.connection = None;
                match broken {
                    ExchangeError::Ended(error) => Err(error),
                    ExchangeError::Io(_) | ExchangeError::Late => Err(over()),
                }
            }
        }
    }
}
