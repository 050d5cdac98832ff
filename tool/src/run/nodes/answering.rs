//! Answers the questions of `devicemesh why` on other nodes ([`questions`](super::questions)).
//!
//! A process of its own, `devicemesh answer`, looks at the ranks: reading a file of /proc may block
//! for ever, and a process that traces its children would disturb this one, which waits for them.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use devicemesh::wait::Wait;

use super::keys;
use super::questions::Question;
use super::shared::{Shared, TELL};

/// The most bytes of an answer. A value of the store has 8 MiB at most.
const MOST_BYTES: u64 = 4 << 20;

/// The part of the node that answers.
#[derive(Default)]
pub struct Answering {
    /// Whether an answer is being made.
    is_busy: Arc<AtomicBool>,
    /// The key of the last answer.
    last: Arc<Mutex<Option<String>>>,
}

impl Answering {
    pub fn is_busy(&self) -> bool {
        self.is_busy.load(Ordering::SeqCst)
    }

    /// Takes the question out of the store, and answers it on a thread of its own. `address` is
    /// where the ranks meet.
    pub fn answer(&self, shared: &Arc<Shared>, arrival: u32, text: &[u8], address: String) {
        let Some(reached) = shared.reached.get() else { return };
        // A question that stays in the store would be answered again and again.
        let wait = Wait::after(TELL);
        if reached.store.delete(&keys::question(arrival), &wait).is_err() {
            return;
        }
        if let Some(last) = self.last.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = reached.store.delete(&last, &wait);
        }
        let Some(question) = Question::read(text) else { return };
        self.is_busy.store(true, Ordering::SeqCst);
        // The thread may be blocked when this job ends, and must not keep the store's server.
        let (shared, is_busy, last) = (Arc::downgrade(shared), Arc::clone(&self.is_busy), Arc::clone(&self.last));
        let work = move || {
            let made = made(&question.request, &address);
            if let (Ok(answer), Some(shared)) = (made, Weak::upgrade(&shared)) {
                let key = question.answer_key(arrival);
                if let Some(reached) = shared.reached.get() {
                    let _ = reached.store.set(&key, &answer, &shared.wait(TELL));
                    *last.lock().unwrap_or_else(PoisonError::into_inner) = Some(key);
                }
            }
            is_busy.store(false, Ordering::SeqCst);
        };
        if std::thread::Builder::new().name("dm-answer".to_owned()).spawn(work).is_err() {
            self.is_busy.store(false, Ordering::SeqCst);
        }
    }
}

/// The answer of `devicemesh answer`.
fn made(request: &str, address: &str) -> std::io::Result<Vec<u8>> {
    let mut answerer = Command::new("/proc/self/exe")
        .arg0("devicemesh")
        .args(["answer", address])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()?;
    if let Some(mut input) = answerer.stdin.take() {
        input.write_all(request.as_bytes())?;
    }
    let mut answer = Vec::new();
    if let Some(output) = answerer.stdout.take() {
        output.take(MOST_BYTES + 1).read_to_end(&mut answer)?;
    }
    answerer.wait()?;
    Ok(answer)
}
