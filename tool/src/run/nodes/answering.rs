//! Answers the questions of `devicemesh why` on other nodes ([`questions`](super::questions)).
//!
//! A process of its own, `devicemesh answer`, looks at the ranks: reading a file of /proc may block
//! for ever, and a process that traces its children would disturb this one, which waits for them.

use std::cell::Cell;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use devicemesh::wait::Wait;

use super::board::Board;
use super::keys;
use super::questions::Question;
use super::shared::{Shared, TELL};
use crate::run::orphans;

/// The most bytes of an answer. A value of the store has 8 MiB at most.
const MOST_BYTES: u64 = 4 << 20;
/// How long the making of an answer may take. `devicemesh answer` ends itself after 20 s.
const LONGEST: Duration = Duration::from_secs(25);
/// How long an answer stays in the store where the asker does not take it.
const KEPT: Duration = Duration::from_secs(30);
/// The first and the longest pause before the node looks again whether an answer is ready.
const SOON: Duration = Duration::from_millis(20);
const LATER: Duration = Duration::from_secs(1);

/// The part of the node that answers.
#[derive(Default)]
pub struct Answering {
    /// Whether an answer is being made.
    is_busy: Arc<AtomicBool>,
    /// The key of the last answer, and when it was written.
    last: Arc<Mutex<Option<(String, Instant)>>>,
    /// The next pause while an answer is being made.
    pause: Cell<Duration>,
}

impl Answering {
    pub fn is_busy(&self) -> bool {
        self.is_busy.load(Ordering::SeqCst)
    }

    /// How long to wait until the next look. While an answer is being made (`is_busy`), the first
    /// pause is short, and each further one is longer. Otherwise the next look is due when the last
    /// answer is too old. `None` where there is no answer.
    pub fn again(&self, is_busy: bool) -> Option<Duration> {
        if is_busy {
            let pause = self.pause.get().clamp(SOON, LATER);
            self.pause.set(pause * 2);
            return Some(pause);
        }
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map(|(_, written)| KEPT.saturating_sub(written.elapsed()).max(SOON))
    }

    /// Removes the last answer from the store where it is too old: its asker has gone.
    pub fn remove_old(&self, store: &Board) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((key, _)) = last.take_if(|(_, written)| written.elapsed() >= KEPT) {
            let _ = store.delete(&key, &Wait::after(TELL));
        }
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
        if let Some((last, _)) = self.last.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = reached.store.delete(&last, &wait);
        }
        let Some(question) = Question::read(text) else { return };
        self.is_busy.store(true, Ordering::SeqCst);
        self.pause.set(SOON);
        // The thread may be blocked when this job ends, and must not keep the store's server.
        let (shared, is_busy, last) = (Arc::downgrade(shared), Arc::clone(&self.is_busy), Arc::clone(&self.last));
        let work = move || {
            let made = made(&question.request, &address);
            if let (Ok(answer), Some(shared)) = (made, Weak::upgrade(&shared)) {
                let key = question.answer_key(arrival);
                if let Some(reached) = shared.reached.get() {
                    let _ = reached.store.set(&key, &answer, &shared.wait(TELL));
                    *last.lock().unwrap_or_else(PoisonError::into_inner) = Some((key, Instant::now()));
                }
            }
            is_busy.store(false, Ordering::SeqCst);
        };
        if std::thread::Builder::new().name("dm-answer".to_owned()).spawn(work).is_err() {
            self.is_busy.store(false, Ordering::SeqCst);
        }
    }
}

/// The answer of `devicemesh answer`. Fails where that takes longer than [`LONGEST`].
fn made(request: &str, address: &str) -> std::io::Result<Vec<u8>> {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("devicemesh")
        .args(["answer", address])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0);
    said(&mut command, request, LONGEST)
}

/// Returns what a command prints when it has read a text. The command is killed where it takes
/// longer than `longest`. A thread of its own awaits the end of the process, because the kernel may
/// be unable to end the process for a while. This thread starts before the command: if it started
/// later and could not, an answer would be lost and the process would stay as a zombie.
fn said(command: &mut Command, text: &str, longest: Duration) -> std::io::Result<Vec<u8>> {
    let (ended, to_reap) = mpsc::channel::<Child>();
    let reap = move || to_reap.recv().map(orphans::wait_for);
    std::thread::Builder::new().name("dm-reaper".to_owned()).spawn(reap)?;
    let mut child = orphans::spawn_awaited(command)?;
    let (input, output) = (child.stdin.take(), child.stdout.take());
    let text = text.to_owned();
    let (sender, receiver) = mpsc::channel();
    let talk = move || {
        let mut said = Vec::new();
        let written = input.map_or(Ok(()), |mut input| input.write_all(text.as_bytes()));
        let read = output.map_or(Ok(0), |output| output.take(MOST_BYTES + 1).read_to_end(&mut said));
        // If the time is over, nobody waits for this.
        let _ = sender.send(written.and(read).map(|_| said));
    };
    let talks = std::thread::Builder::new().name("dm-answerer".to_owned()).spawn(talk);
    let said = talks.and_then(|_| receiver.recv_timeout(longest).unwrap_or_else(|_| Err(ErrorKind::TimedOut.into())));
    // The child has nothing more to say, and it may be blocked.
    let _ = child.kill();
    let _ = ended.send(child);
    said
}

#[cfg(test)]
mod tests {
    use devicemesh::rendezvous::store::{Server, TcpStore};
    use rustix::io::Errno;
    use rustix::process::{Resource, Rlimit, WaitOptions, getrlimit, setrlimit, wait};

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    #[test]
    fn a_command_that_hangs_or_does_not_read_is_ended() {
        assert_eq!(said(&mut shell("cat"), "all", LONGEST).unwrap(), b"all");
        let began = Instant::now();
        let file = std::env::temp_dir().join(format!("dm-answering-{}", std::process::id()));
        let hangs = format!("echo $$ > {}; exec sleep 1000", file.display());
        // On a busy machine, the shell may need a second before it has written its number.
        assert_eq!(said(&mut shell(&hangs), "", Duration::from_secs(2)).unwrap_err().kind(), ErrorKind::TimedOut);
        // More than a pipe holds.
        let long = "a".repeat(1 << 20);
        assert_eq!(said(&mut shell("exit 0"), &long, LONGEST).unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert!(began.elapsed() < LONGEST);
        // No zombie is left.
        let pid = std::fs::read_to_string(&file).unwrap().trim().to_owned();
        std::fs::remove_file(&file).unwrap();
        while std::path::Path::new(&format!("/proc/{pid}")).exists() {
            assert!(began.elapsed() < LONGEST, "process {pid} is still there");
            std::thread::sleep(SOON);
        }
    }

    /// The test runs once more in a process of its own, in which a thread finds no room for its
    /// stack.
    #[test]
    fn no_zombie_is_left_where_no_thread_starts() {
        if std::env::var_os("LIBDEVICEMESH_TEST_NO_THREADS").is_none() {
            let name = "run::nodes::answering::tests::no_zombie_is_left_where_no_thread_starts";
            let mut again = Command::new(std::env::current_exe().unwrap());
            again.args(["--exact", name, "--test-threads=1"]).env("LIBDEVICEMESH_TEST_NO_THREADS", "1");
            let done = again.output().unwrap();
            let said = String::from_utf8_lossy(&done.stdout);
            assert!(done.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
        let limit = Some(pages * rustix::param::page_size() as u64 + (1 << 20));
        setrlimit(Resource::As, Rlimit { current: limit, ..getrlimit(Resource::As) }).unwrap();
        let error = said(&mut shell("cat"), "all", LONGEST).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
        assert_eq!(wait(WaitOptions::NOHANG).unwrap_err(), Errno::CHILD, "a child is left");
    }

    #[test]
    fn the_pauses_grow_to_one_second_and_an_old_answer_is_looked_at() {
        let answering = Answering::default();
        assert_eq!(answering.again(false), None);
        let pauses: Vec<u128> = (0..8).filter_map(|_| answering.again(true)).map(|pause| pause.as_millis()).collect();
        assert_eq!(pauses, [20, 40, 80, 160, 320, 640, 1000, 1000]);
        *answering.last.lock().unwrap() = Some(("key".to_owned(), Instant::now()));
        assert!(answering.again(false).is_some_and(|pause| pause > SOON && pause <= KEPT));
    }

    #[test]
    fn an_answer_that_nobody_takes_is_removed() {
        let server = Server::at("127.0.0.1", 0, None).unwrap();
        let wait = Wait::after(LONGEST);
        let store = Board::new(TcpStore::connect("127.0.0.1", server.local_addr().port(), &wait).unwrap(), None);
        store.set("key", b"answer", &wait).unwrap();
        let answering = Answering::default();
        *answering.last.lock().unwrap() = Some(("key".to_owned(), Instant::now()));
        answering.remove_old(&store);
        assert!(store.try_get("key", &wait).unwrap().is_some());
        *answering.last.lock().unwrap() = Some(("key".to_owned(), Instant::now().checked_sub(KEPT).unwrap()));
        answering.remove_old(&store);
        assert!(store.try_get("key", &wait).unwrap().is_none() && answering.again(false).is_none());
    }
}
