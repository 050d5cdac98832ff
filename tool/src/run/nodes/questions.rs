//! Questions of `devicemesh why` to the tools of the other nodes, through the store.
//!
//! The asker writes a question under a key of each node. The node takes the key away and writes its
//! answer under a key of the asker, who takes that key away. The asker takes back a question that a
//! node has not taken by its deadline. A node removes its last answer, which may have come too
//! late, when the next question comes, or after half a minute. So the store holds one answer of
//! each node at most.

use std::time::{Duration, Instant};

use devicemesh::error::{Error, Result, Status};
use devicemesh::wait::Wait;
use serde::{Deserialize, Serialize};

use super::board::Board;
use super::keys;

/// The most nodes that are asked at the same time. Their answers fill the store's memory together.
const AT_ONCE: usize = 16;
/// The pause before a question is written again where the question of another asker is still in
/// its place.
const AGAIN: Duration = Duration::from_millis(10);
/// The longest text by which an asker knows its question.
const LONGEST_NAME: usize = 64;

/// A node that is asked.
#[derive(Clone)]
pub struct Peer {
    /// Its arrival number.
    pub arrival: u32,
    /// Its name for messages: "node 1 (beta)".
    pub name: String,
    /// Its ranks, where they are known.
    pub ranks: Vec<u32>,
    /// Why it cannot be asked. `None` where it can.
    pub lost: Option<String>,
}

/// A question as it stands in the store.
#[derive(Clone, Serialize, Deserialize)]
pub struct Question {
    /// The asker's own text for this question.
    asker: String,
    /// The question, as `devicemesh answer` reads it.
    pub request: String,
}

impl Question {
    /// Reads a question, which anybody may have written.
    pub fn read(text: &[u8]) -> Option<Question> {
        let question: Question = serde_json::from_slice(text).ok()?;
        let is_plain = question.asker.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        (is_plain && question.asker.len() <= LONGEST_NAME).then_some(question)
    }

    /// The key of a node's answer.
    pub fn answer_key(&self, arrival: u32) -> String {
        keys::answer(&self.asker, arrival)
    }
}

/// Asks the peers, and returns the answer of each one, or why there is none. Each peer has
/// `patience` from the moment at which it is asked.
pub fn ask(
    board: &Board,
    peers: &[Peer],
    request: &str,
    patience: Duration,
) -> Vec<std::result::Result<Vec<u8>, String>> {
    let asker = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default().trim().to_owned();
    let question = Question { asker, request: request.to_owned() };
    let mut answers = vec![None; peers.len()];
    let done = Asking { board, peers, question, patience }.run(&mut answers);
    let why = |peer: &Peer| match (&peer.lost, &done) {
        (Some(lost), _) => lost.clone(),
        (None, Ok(())) => format!("did not answer within {} s", patience.as_secs_f64()),
        (None, Err(error)) => format!("was not asked: {}", error.message()),
    };
    peers.iter().zip(answers).map(|(peer, answer)| answer.ok_or_else(|| why(peer))).collect()
}

/// Waits for a question to the node with this arrival number, and takes it out of the store. `None`
/// when nobody asks any more ([`end_questions`]).
pub fn next_question(board: &Board, arrival: u32, wait: &Wait) -> Result<Option<Question>> {
    let key = keys::question(arrival);
    loop {
        let (at, text) = board.get_any(&[&key, keys::OVER], wait)?;
        if at > 0 {
            board.add(keys::LEFT, 1, wait)?;
            return Ok(None);
        }
        board.delete(&key, wait)?;
        if let Some(question) = Question::read(&text) {
            return Ok(Some(question));
        }
    }
}

/// Tells those that wait for questions that there are no more.
pub fn end_questions(board: &Board) {
    // If this write fails, they notice the end of the store.
    let _ = board.set(keys::OVER, b"1", &Wait::after(AGAIN * 100));
}

/// How many have read that there are no more questions.
pub fn left(board: &Board) -> usize {
    let count = board.try_get(keys::LEFT, &Wait::after(AGAIN * 100)).ok().flatten().unwrap_or_default();
    String::from_utf8_lossy(&count).trim().parse().unwrap_or(0)
}

struct Asking<'a> {
    board: &'a Board,
    peers: &'a [Peer],
    question: Question,
    patience: Duration,
}

/// A peer that is asked now.
struct Asked {
    /// The place of the peer among the peers.
    peer: usize,
    until: Instant,
    /// Whether the question was written into the store.
    is_written: bool,
}

impl Asked {
    fn wait(&self) -> Wait {
        Wait::after(self.until.saturating_duration_since(Instant::now()))
    }
}

impl Asking<'_> {
    /// Asks all peers that are not lost. Fails where the store does not answer.
    fn run(&self, answers: &mut [Option<Vec<u8>>]) -> Result<()> {
        let text = serde_json::to_vec(&self.question).map_err(|error| Error::internal(error.to_string()))?;
        let mut others = (0..self.peers.len()).filter(|peer| self.peers[*peer].lost.is_none());
        let mut asked: Vec<Asked> = Vec::new();
        loop {
            let free = AT_ONCE - asked.len();
            let until = Instant::now() + self.patience;
            asked.extend(others.by_ref().take(free).map(|peer| Asked { peer, until, is_written: false }));
            let Some(soonest) = asked.iter().map(|one| one.until).min() else { return Ok(()) };
            for one in asked.iter_mut().filter(|one| !one.is_written) {
                one.is_written = self.write(one, &text)?;
            }
            let keys: Vec<String> = asked.iter().map(|one| self.question.answer_key(self.arrival(one))).collect();
            let is_written = asked.iter().all(|one| one.is_written);
            let left = soonest.saturating_duration_since(Instant::now());
            let left = if is_written { left } else { left.min(AGAIN) };
            match self.board.get_any(&keys.iter().map(String::as_str).collect::<Vec<_>>(), &Wait::after(left)) {
                Ok((at, answer)) => {
                    answers[asked.remove(at).peer] = Some(answer);
                    self.board.delete(&keys[at], &Wait::after(self.patience))?;
                }
                Err(error) if error.status() == Status::Timeout => {}
                Err(error) => return Err(error),
            }
            let is_late = |one: &Asked| one.until <= Instant::now();
            let (late, rest): (Vec<Asked>, Vec<Asked>) = asked.into_iter().partition(is_late);
            asked = rest;
            late.iter().filter(|one| one.is_written).try_for_each(|one| self.take_back(one, &text))?;
        }
    }

    fn arrival(&self, asked: &Asked) -> u32 {
        self.peers[asked.peer].arrival
    }

    /// Whether the question stands in the store now. It does not where another asker's question has
    /// not been taken yet.
    fn write(&self, asked: &Asked, text: &[u8]) -> Result<bool> {
        match self.board.set_once(&keys::question(self.arrival(asked)), text, &asked.wait()) {
            Ok(found) => Ok(found == text),
            Err(error) if error.status() == Status::Timeout => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes a question that the peer has not taken.
    fn take_back(&self, asked: &Asked, text: &[u8]) -> Result<()> {
        let (key, wait) = (keys::question(self.arrival(asked)), Wait::after(self.patience));
        match self.board.try_get(&key, &wait)?.is_some_and(|found| found == text) {
            true => self.board.delete(&key, &wait),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use devicemesh::rendezvous::store::{Server, TcpStore};

    use super::*;

    const SOON: Duration = Duration::from_secs(1);

    fn peer(arrival: u32, lost: Option<&str>) -> Peer {
        Peer { arrival, name: format!("node {arrival}"), ranks: Vec::new(), lost: lost.map(str::to_owned) }
    }

    #[test]
    fn each_peer_answers_or_is_named_and_nothing_stays_in_the_store() {
        let server = Server::at("127.0.0.1", 0, None).unwrap();
        let port = server.local_addr().port();
        let board = || Board::new(TcpStore::connect("127.0.0.1", port, &Wait::after(SOON * 10)).unwrap(), None);
        let answering = |arrival: u32| {
            let board = board();
            std::thread::spawn(move || {
                let mut answered = 0;
                while let Some(question) = next_question(&board, arrival, &Wait::after(SOON * 30)).unwrap() {
                    let answer = format!("{arrival}: {}", question.request);
                    board.set(&question.answer_key(arrival), answer.as_bytes(), &Wait::after(SOON)).unwrap();
                    answered += 1;
                }
                answered
            })
        };
        // More than are asked at one time, one that says nothing, and one that is lost.
        let threads: Vec<_> = (1..=20).map(answering).collect();
        let mut peers: Vec<Peer> = (1..=20).map(|arrival| peer(arrival, None)).collect();
        peers.extend([peer(21, None), peer(22, Some("has gone"))]);
        let asker = board();
        let answers = ask(&asker, &peers, "who?", SOON);
        for (arrival, answer) in (1..=20).zip(&answers) {
            assert_eq!(answer.as_deref(), Ok(format!("{arrival}: who?").as_bytes()));
        }
        assert_eq!(answers[20], Err("did not answer within 1 s".to_owned()));
        assert_eq!(answers[21], Err("has gone".to_owned()));
        let keys: Vec<String> = (1..=22).map(keys::question).collect();
        assert!(!asker.present(&keys, &Wait::after(SOON)).unwrap().contains(&true));
        end_questions(&asker);
        assert!(threads.into_iter().all(|thread| thread.join().unwrap() == 1));
        assert_eq!(left(&asker), 20);
    }

    #[test]
    fn a_question_that_is_none_is_not_answered() {
        for text in [
            "",
            "{}",
            "{\"asker\": \"../over\", \"request\": \"\"}",
            &format!("{{\"asker\": \"{}\", \"request\": \"\"}}", "a".repeat(65)),
        ] {
            assert!(Question::read(text.as_bytes()).is_none(), "{text}");
        }
        let question = Question::read(b"{\"asker\": \"0a-1\", \"request\": \"{}\"}").unwrap();
        assert_eq!(question.answer_key(3), "devicemesh/run/answer/0a-1/3");
    }
}
