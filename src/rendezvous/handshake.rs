//! Finding each other on a store that may hold what an earlier run left: an agent's, a folder, the caller's own.
//!
//! Rank 0 chooses a nonce, under which all keys of this run stand. Every other rank makes a token of its own, which nothing old can carry,
//! leaves it under the next number with the nonces that it has tried in vain, and rank 0 hands it the nonce under that token. Whose token it is does not matter, so ranks that
//! are wrong about the world's size get it too, and the agreement that follows tells them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::store::{self, Store, refused_connections};
use crate::error::{Error, Result, Status};
use crate::wait::{Deadline, Wait};

/// Rank 0 looks for tokens, first after this time and at last this often.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LAST_LOOK: Duration = Duration::from_millis(20);
/// Tokens that are looked for anew in one look.
const TOKENS: i64 = 4096;
/// After a mismatch, how long late ranks can still learn of it.
const STAY: Duration = Duration::from_millis(500);

/// How long the store may take to say whom it refused.
const ASK_REFUSED: Duration = Duration::from_millis(200);

/// What a rank learns from rank 0 when it joins.
pub(super) struct Session {
    /// The keys of this world begin with this prefix.
    pub(super) prefix: String,
    /// How many ranks rank 0 takes the world to have. It is `None` when rank 0 does not say so.
    pub(super) size: Option<usize>,
}

/// Raises a flag when it goes.
struct RaiseOnDrop<'a>(&'a AtomicBool);

impl Drop for RaiseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Rank 0's part.
pub(super) struct NonceServer {
    store: Arc<dyn Store>,
    prefix: String,
    nonce: String,
    size: usize,
}

impl NonceServer {
    pub(super) fn new(store: Arc<dyn Store>, prefix: &str, size: usize) -> NonceServer {
        NonceServer { store, prefix: prefix.to_owned(), nonce: random(), size }
    }

    pub(super) fn session(&self) -> Session {
        Session { prefix: format!("{}/{}", self.prefix, self.nonce), size: Some(self.size) }
    }

    /// Hands the nonce to whoever comes while `work` lasts.
    pub(super) fn while_others_come(&self, wait: &Wait, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let hand_out = || self.hand_out(&done, wait);
            let handing = hostccl::thread::spawn_scoped(threads, "dm-nonce", hand_out);
            if let Err(error) = handing {
                return Err(Error::no_thread(&error));
            }
            // Also where `work` unwinds, out of the caller's store for one: the scope waits for the thread, which ends when it is told so.
            let _telling = RaiseOnDrop(&done);
            let outcome = work();
            if outcome.as_ref().is_err_and(|error| error.status() == Status::Mismatch) {
                std::thread::sleep(STAY);
            }
            outcome
        })
    }

    /// Trouble with the store is told by the work beside it.
    fn hand_out(&self, done: &AtomicBool, wait: &Wait) {
        let (mut count, mut pause) = (0i64, FIRST_LOOK);
        // Numbers whose token is still to come; of a rank that died in between it never does.
        let mut open: Vec<i64> = Vec::new();
        while !done.load(Ordering::SeqCst) {
            let now = self.store.try_get(&format!("{}/tokens", self.prefix), wait).ok().flatten();
            let now = now.and_then(|text| String::from_utf8_lossy(&text).trim().parse().ok()).unwrap_or(count);
            // So many in one look: the number is what others say.
            let now = now.clamp(count, count.saturating_add(TOKENS));
            open.extend(count + 1..=now);
            count = now;
            let before = open.len();
            open.retain(|number| !self.hand_to(*number, wait));
            if open.len() == before {
                std::thread::sleep(pause);
                pause = (pause * 2).min(LAST_LOOK);
            } else {
                pause = FIRST_LOOK;
            }
        }
    }

    /// Whether the rank that drew that number has the nonce now.
    fn hand_to(&self, number: i64, wait: &Wait) -> bool {
        let Ok(Some(token)) = self.store.try_get(&format!("{}/token/{number}", self.prefix), wait) else {
            return false;
        };
        let token = String::from_utf8_lossy(&token);
        let mut words = token.split(' ');
        let key = format!("{}/nonce/{}", self.prefix, words.next().unwrap_or_default());
        if words.any(|tried| tried == self.nonce) {
            // It has been in this join, which failed, and waits for the next one.
            return true;
        }
        self.store.set(&key, said(&self.nonce, self.size).as_bytes(), wait).is_ok()
    }
}

/// Rank 0's part where it serves the store itself. No older run left anything there, but what is left of one may come back when rank 0
/// starts again at the same address: so the keys of this run stand under a nonce here too.
pub(super) fn lead(store: &dyn Store, prefix: &str, size: usize, wait: &Wait) -> Result<Session> {
    let nonce = random();
    store.set(&format!("{prefix}/session"), said(&nonce, size).as_bytes(), wait)?;
    Ok(Session { prefix: format!("{prefix}/{nonce}"), size: Some(size) })
}

/// What rank 0 says to the others: the nonce, and the size of the world.
fn said(nonce: &str, size: usize) -> String {
    format!("{nonce} {size}")
}

/// Every other rank's part in that. A nonce that it has `tried` before is of a join that failed, and another one comes in its place.
pub(super) fn follow(store: &dyn Store, prefix: &str, tried: &[String], wait: &Wait) -> Result<Session> {
    loop {
        let session = receive(store, prefix, "session", wait)?;
        if !tried.iter().any(|nonce| session.prefix.ends_with(nonce.as_str())) {
            return Ok(session);
        }
        wait.look_around()?;
        if wait.deadline.passed() {
            return Err(never_joined(store, wait));
        }
        std::thread::sleep(LAST_LOOK.min(wait.deadline.slice()));
    }
}

/// Every other rank's part: the prefix of this run's keys. Rank 0 of a join that this rank has `tried` before does not hand its nonce to it again.
pub(super) fn ask(store: &dyn Store, prefix: &str, tried: &[String], wait: &Wait) -> Result<Session> {
    let token = random();
    let number = store.add(&format!("{prefix}/tokens"), 1, wait)?;
    let text = [std::slice::from_ref(&token), tried].concat().join(" ");
    store.set(&format!("{prefix}/token/{number}"), text.as_bytes(), wait)?;
    let received = receive(store, prefix, &format!("nonce/{token}"), wait);
    // Rank 0 has handed it out, or it never will to this token.
    store.forget(vec![format!("{prefix}/token/{number}"), format!("{prefix}/nonce/{token}")], wait);
    received
}

fn never_joined(store: &dyn Store, wait: &Wait) -> Error {
    let timeout = wait.deadline.timeout().as_millis();
    let soon = Wait { watch: None, ..wait.with_deadline(Deadline::after(ASK_REFUSED)) };
    let refused = refused_connections(store, &soon).map_or(String::new(), |refused| format!("; {refused}"));
    Error::timeout(format!("rank 0 never joined the world at {} within {timeout} ms{refused}", store.name()))
        .with_ranks(&[0])
}

fn receive(store: &dyn Store, prefix: &str, key: &str, wait: &Wait) -> Result<Session> {
    let said = store.get(&format!("{prefix}/{key}"), wait).map_err(|error| match error.status() {
        Status::Timeout => never_joined(store, wait),
        _ => error,
    })?;
    let said = String::from_utf8_lossy(&said).into_owned();
    let (nonce, size) = said.split_once(' ').unwrap_or((&said, ""));
    Ok(Session { prefix: format!("{prefix}/{nonce}"), size: size.parse().ok() })
}

/// 16 hexadecimal digits that no other process or call has.
pub(super) fn random() -> String {
    format!("{:016x}", store::random())
}
