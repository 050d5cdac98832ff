//! Finds the other ranks in a store that may hold what an earlier run left: the store of an agent,
//! a folder, or the caller's own store.
//!
//! Rank 0 chooses a nonce, and all keys of this run stand under it. Every other rank makes a random
//! token, which no earlier run can have left in the store. The rank leaves the token under the next
//! number, with the nonces that it has tried in vain. Rank 0 answers with the nonce, under a key
//! with that token. Rank 0 does not ask whose token it is, so ranks that take the world to have
//! another size get the nonce too, and the agreement that follows tells them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::Duration;

use super::store::{self, Arrival, Store, refused_connections};
use crate::error::{Error, Result, Status};
use crate::wait::{Deadline, Wait};

/// The first pause of rank 0 between two looks for tokens. The pause doubles while no token comes.
const FIRST_LOOK: Duration = Duration::from_millis(1);
/// The longest pause of rank 0 between two looks for tokens.
const LAST_LOOK: Duration = Duration::from_millis(20);
/// The pause of rank 0 between a token that has come and the look that reads it.
const BEFORE_LOOK: Duration = Duration::from_micros(100);
/// The most new tokens that one look expects.
const TOKENS: i64 = 4096;
/// How long late ranks can still learn of a mismatch.
const STAY: Duration = Duration::from_millis(500);

/// How long the store may take to say whom it refused.
const ASK_REFUSED: Duration = Duration::from_millis(200);

/// The facts that a rank learns from rank 0 when it joins.
pub(super) struct Session {
    /// The keys of this world begin with this prefix.
    pub(super) prefix: String,
    /// The size of rank 0's world; `None` when rank 0 does not say it.
    pub(super) size: Option<usize>,
}

impl Session {
    /// Reads what rank 0 has [`said`].
    fn of(prefix: &str, said: &[u8]) -> Session {
        let said = String::from_utf8_lossy(said);
        let (nonce, size) = said.split_once(' ').unwrap_or((&said, ""));
        Session { prefix: format!("{prefix}/{nonce}"), size: size.parse().ok() }
    }
}

/// Raises a flag when it is dropped, and wakes the thread that looks at the flag.
struct RaiseOnDrop<'a>(&'a AtomicBool, Thread);

impl Drop for RaiseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
        self.1.unpark();
    }
}

/// Hands out the nonce on behalf of rank 0.
pub(super) struct NonceServer {
    /// The store in which the ranks meet.
    store: Arc<dyn Store>,
    /// The keys of this join begin with this prefix.
    prefix: String,
    /// The nonce of this run.
    nonce: String,
    /// The number of ranks, which the others are told with the nonce.
    size: usize,
}

impl NonceServer {
    pub(super) fn new(store: Arc<dyn Store>, prefix: &str, size: usize) -> NonceServer {
        NonceServer { store, prefix: prefix.to_owned(), nonce: random(), size }
    }

    pub(super) fn session(&self) -> Session {
        Session { prefix: format!("{}/{}", self.prefix, self.nonce), size: Some(self.size) }
    }

    /// Hands out the nonce to all ranks that ask for it while `work` lasts.
    pub(super) fn while_others_come<T>(&self, wait: &Wait, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let hand_out = || self.hand_out(&done, wait);
            let handing = hostccl::thread::spawn_scoped(threads, "dm-nonce", hand_out);
            let handing = handing.map_err(|error| Error::no_thread(&error))?;
            // The flag is raised also when `work` panics, for example in the caller's store,
            // because the scope waits for the thread.
            let _telling = RaiseOnDrop(&done, handing.thread().clone());
            let outcome = work();
            if outcome.as_ref().is_err_and(|error| error.status() == Status::Mismatch) {
                std::thread::sleep(STAY);
            }
            outcome
        })
    }

    /// Answers the tokens until `done` is raised. The work that runs at the same time reports what
    /// is wrong with the store.
    fn hand_out(&self, done: &AtomicBool, wait: &Wait) {
        let (mut count, mut pause) = (0i64, FIRST_LOOK);
        // The numbers whose token is not there yet. A rank that died before it left its token never
        // leaves it.
        let mut open: Vec<i64> = Vec::new();
        while !done.load(Ordering::SeqCst) {
            let now = self.store.try_get(&format!("{}/tokens", self.prefix), wait).ok().flatten();
            let now = now.and_then(|text| String::from_utf8_lossy(&text).trim().parse().ok()).unwrap_or(count);
            // Other processes have written the number, so one look follows at most TOKENS of them.
            let now = now.clamp(count, count.saturating_add(TOKENS));
            open.extend(count + 1..=now);
            count = now;
            let before = open.len();
            open.retain(|number| !self.hand_to(*number, wait));
            if open.len() < before {
                pause = FIRST_LOOK;
                continue;
            }
            self.pause(count, pause, wait);
            pause = (pause * 2).min(LAST_LOOK);
        }
    }

    /// Waits for the token after token `count`. Once each rank may have left a token, the thread
    /// only sleeps, because a sleep ends at once when all ranks have come, and a wait at the store
    /// does not.
    fn pause(&self, count: i64, longest: Duration, wait: &Wait) {
        if count + 1 < self.size as i64 {
            let soon = wait.with_deadline(Deadline::after(longest));
            match self.store.get_any(&[&format!("{}/token/{}", self.prefix, count + 1)], &soon) {
                Err(error) if error.status() == Status::Timeout => return,
                // The next look finds the token, unless the count of tokens cannot be read.
                Ok(_) => return std::thread::park_timeout(BEFORE_LOOK),
                Err(_) => {}
            }
        }
        std::thread::park_timeout(longest);
    }

    /// Answers token `number`. Returns whether nothing is left to do for this number.
    fn hand_to(&self, number: i64, wait: &Wait) -> bool {
        let Ok(Some(token)) = self.store.try_get(&format!("{}/token/{number}", self.prefix), wait) else {
            return false;
        };
        let token = String::from_utf8_lossy(&token);
        let mut words = token.split(' ');
        let key = format!("{}/nonce/{}", self.prefix, words.next().unwrap_or_default());
        if words.any(|tried| tried == self.nonce) {
            // This rank has tried this nonce in a join that failed, and waits for the nonce of the
            // next join.
            return true;
        }
        self.store.set(&key, said(&self.nonce, self.size).as_bytes(), wait).is_ok()
    }
}

/// Publishes a nonce on behalf of rank 0, which serves the store itself. An earlier run has left
/// nothing there, but its ranks may come back when rank 0 starts again at the same address. So the
/// keys of this run stand under a nonce here too.
pub(super) fn lead(store: &dyn Store, prefix: &str, size: usize, wait: &Wait) -> Result<Session> {
    let nonce = random();
    store.set(&format!("{prefix}/session"), said(&nonce, size).as_bytes(), wait)?;
    Ok(Session { prefix: format!("{prefix}/{nonce}"), size: Some(size) })
}

/// Returns what rank 0 tells the others: the nonce, and the size of the world.
fn said(nonce: &str, size: usize) -> String {
    format!("{nonce} {size}")
}

/// Reads on behalf of every other rank what [`lead`] has published. A nonce that the rank has
/// `tried` before belongs to a join that failed, so the rank waits for another nonce.
pub(super) fn follow(store: &dyn Store, prefix: &str, tried: &[String], wait: &Wait) -> Result<Session> {
    loop {
        let session = receive(store, prefix, "session", wait)?;
        if !tried.iter().any(|nonce| session.prefix.ends_with(nonce.as_str())) {
            return Ok(session);
        }
        wait.look_around()?;
        if wait.deadline.passed() {
            return Err(never_joined(store, "", wait));
        }
        std::thread::sleep(LAST_LOOK.min(wait.deadline.slice()));
    }
}

/// Asks rank 0 for the nonce on behalf of every other rank. Rank 0 does not answer with a nonce
/// that this rank has `tried` before.
pub(super) fn ask(store: &dyn Store, prefix: &str, tried: &[String], wait: &Wait) -> Result<Session> {
    let (token, tokens) = (random(), format!("{prefix}/tokens"));
    let number = store.add(&tokens, 1, wait)?;
    let text = [std::slice::from_ref(&token), tried].concat().join(" ");
    let (left, nonce) = (format!("{prefix}/token/{number}"), format!("{prefix}/nonce/{token}"));
    let arrival = Arrival { note: Some((&left, text.as_bytes())), count: None };
    // A store that gives a wrong index is told of in the agreement that follows, on all ranks.
    let said = store.arrive(&arrival, &[&nonce], &mut |_| Ok(()), wait);
    let said = said.map(|found| found.unwrap_or_default().1).map_err(|error| match error.status() {
        Status::Timeout => never_joined(store, &unread_sum(store, &tokens, number, wait), wait),
        _ => error,
    });
    let received = said.map(|said| Session::of(prefix, &said));
    // Rank 0 has answered this token, or never will.
    store.forget(vec![left, nonce], wait);
    received
}

/// Returns the error of a rank that has waited for rank 0 until its deadline. `reason` is empty, or
/// begins with a semicolon.
fn never_joined(store: &dyn Store, reason: &str, wait: &Wait) -> Error {
    let timeout = wait.deadline.timeout().as_millis();
    let refused =
        refused_connections(store, &for_a_reason(wait)).map_or(String::new(), |refused| format!("; {refused}"));
    Error::timeout(format!("rank 0 never joined the world at {} within {timeout} ms{refused}{reason}", store.name()))
        .with_ranks(&[0])
}

/// Returns a wait for a look at the store that may tell why another wait has failed.
fn for_a_reason(wait: &Wait) -> Wait {
    Wait { watch: None, ..wait.with_deadline(Deadline::after(ASK_REFUSED)) }
}

/// Says that nobody can read the integer under `key`, for which `add` gave `sum`. The text is empty
/// where the integer can be read. The caller's own store may keep integers apart from values. Then
/// rank 0 cannot know how many tokens there are.
fn unread_sum(store: &dyn Store, key: &str, sum: i64, wait: &Wait) -> String {
    let Ok(found) = store.try_get(key, &for_a_reason(wait)) else { return String::new() };
    let text = found.as_deref().map(String::from_utf8_lossy);
    if text.as_ref().is_some_and(|text| text.trim().parse::<i64>().is_ok()) {
        return String::new();
    }
    let gives = text.map_or("nothing".to_owned(), |text| format!("{text:?}"));
    format!("; add to key {key} gave {sum}, but get of that key gives {gives}: it must give the sum in decimal digits")
}

/// Waits for what rank 0 has said under this key.
fn receive(store: &dyn Store, prefix: &str, key: &str, wait: &Wait) -> Result<Session> {
    let said = store.get(&format!("{prefix}/{key}"), wait).map_err(|error| never_came(error, store, wait))?;
    Ok(Session::of(prefix, &said))
}

/// Returns the error of a rank that could not read what rank 0 says.
fn never_came(error: Error, store: &dyn Store, wait: &Wait) -> Error {
    match error.status() {
        Status::Timeout => never_joined(store, "", wait),
        _ => error,
    }
}

/// Returns 16 hexadecimal digits that no other process or call has.
pub(super) fn random() -> String {
    format!("{:016x}", store::random())
}

#[cfg(test)]
mod tests {
    use super::store::MemoryStore;
    use super::*;

    /// A store whose integers cannot be read as values.
    #[derive(Default)]
    struct IntegersApart {
        values: MemoryStore,
        integers: MemoryStore,
    }

    impl Store for IntegersApart {
        fn set(&self, key: &str, value: &[u8], wait: &Wait) -> Result<()> {
            self.values.set(key, value, wait)
        }

        fn get_any(&self, keys: &[&str], wait: &Wait) -> Result<(usize, Vec<u8>)> {
            self.values.get_any(keys, wait)
        }

        fn try_get(&self, key: &str, wait: &Wait) -> Result<Option<Vec<u8>>> {
            self.values.try_get(key, wait)
        }

        fn add(&self, key: &str, amount: i64, wait: &Wait) -> Result<i64> {
            self.integers.add(key, amount, wait)
        }

        fn set_once(&self, key: &str, value: &[u8], wait: &Wait) -> Result<Vec<u8>> {
            self.values.set_once(key, value, wait)
        }

        fn present(&self, keys: &[String], wait: &Wait) -> Result<Vec<bool>> {
            self.values.present(keys, wait)
        }

        fn delete(&self, key: &str, wait: &Wait) -> Result<()> {
            self.values.delete(key, wait)
        }

        fn name(&self) -> &str {
            "a store of a test"
        }
    }

    #[test]
    fn a_rank_says_that_the_integers_of_its_store_cannot_be_read() {
        let wait = Wait::after(Duration::from_millis(50));
        let error = ask(&IntegersApart::default(), "p", &[], &wait).err().expect("there is no rank 0");
        let text =
            "; add to key p/tokens gave 1, but get of that key gives nothing: it must give the sum in decimal digits";
        assert!(error.status() == Status::Timeout && error.message().ends_with(text), "{error}");

        let error = ask(&MemoryStore::new(), "p", &[], &wait).err().expect("there is no rank 0");
        assert!(error.status() == Status::Timeout && error.message().ends_with("within 50 ms"), "{error}");
    }
}
