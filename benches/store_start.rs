//! The start of a job of thousands of ranks as its store sees it: every rank connects, greets,
//! arrives, agrees on a call and ends it. benches/store_start.py runs it against our store and
//! PyTorch's in turn.
//!
//! `serve <ranks>`: serves until its input ends; prints the port.
//! `drive <port> <first> <end> <world> <run> <form>`: plays the ranks first..end of world, each
//! with a connection of its own. It prints one line `<phase> <seconds>` for each phase when all its
//! ranks are through. With the form `ours` the ranks send what this library sends to a server of
//! its own. With `torch` they send the same agreement in the operations of PyTorch's protocol,
//! which both servers know.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use devicemesh::rendezvous::store::Server;
use devicemesh::rendezvous::store::frame::{Writer, op};

const HELLO: [u8; 10] = [0, 0xce, 0xf7, 0x85, 0x3c, 13, 1, 2, 3, 4];
const AGREED: &[u8] = b"0 0 0 0\n";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    raise_descriptor_limit();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", ranks] => serve(ranks.parse().expect("a number")),
        ["drive", port, first, end, world, run, form @ ("ours" | "torch")] => {
            let number = |text: &str| text.parse::<usize>().expect("a number");
            let ranks = connect(number(port) as u16, number(first)..number(end));
            let start = Start { ranks, world: number(world), run: run.to_owned() };
            if form == "ours" { start.agree_with_ours() } else { start.agree_with_any() }
        }
        _ => println!("store_start: run it through benches/store_start.py (make bench-store)"),
    }
}

fn serve(ranks: usize) {
    let server = Server::bind("0.0.0.0:0").expect("a free port");
    server.expect_ranks(ranks);
    println!("{}", server.local_addr().port());
    let _ = std::io::stdin().read(&mut [0]);
}

fn raise_descriptor_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid structure to fill and to read.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
}

struct Rank {
    number: usize,
    stream: TcpStream,
}

impl Rank {
    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server listens");
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).expect("the server answers");
        bytes
    }

    fn number(&mut self) -> i64 {
        i64::from_le_bytes(self.bytes())
    }

    fn string(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; self.number() as usize];
        self.stream.read_exact(&mut bytes).expect("the server answers");
        bytes
    }
}

/// Prints how long the phase took, and begins the next one.
fn lap(phase: &str, began: &mut Instant) {
    println!("{phase} {:.6}", began.elapsed().as_secs_f64());
    *began = Instant::now();
}

fn connect(port: u16, ranks: std::ops::Range<usize>) -> Vec<Rank> {
    let mut began = Instant::now();
    let mut ranks: Vec<Rank> = ranks
        .map(|number| {
            // An address of the server has ports for some 28,000 connections from one address.
            let host = [127, 0, 0, 1 + (number / 20_000) as u8];
            let stream = TcpStream::connect((std::net::IpAddr::from(host), port)).expect("the server listens");
            stream.set_nodelay(true).expect("a socket");
            let mut rank = Rank { number, stream };
            rank.send(&HELLO);
            rank
        })
        .collect();
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.bytes(), [1, 2, 3, 4]));
    lap("connect", &mut began);
    ranks
}

/// The ranks of one process, and the job that they start.
struct Start {
    ranks: Vec<Rank>,
    world: usize,
    run: String,
}

impl Start {
    fn key(&self, name: &str) -> Vec<u8> {
        format!("/bench/{}/{name}", self.run).into_bytes()
    }

    fn call(&self) -> String {
        format!("dm_world_init(device_type=cuda, world_size={}, version=0.2.0)\n", self.world)
    }

    /// Says that the ranks are idle, and waits, so that the server's memory can be read.
    fn idle(self) {
        println!("idle");
        let _ = std::io::stdin().read(&mut [0]);
    }

    /// Makes the agreement in two requests of each rank. The first one stores the rank's text and
    /// waits for that of the first rank. The second one counts the rank in and waits for the
    /// verdict. In each wait a rank also waits for two more keys.
    fn agree_with_ours(mut self) {
        let mut began = Instant::now();
        let (call, first, lost, left) = (self.call(), self.key("here/0"), self.key("lost/1"), self.key("left/1"));
        let wait = |writer: Writer, keys: &[&[u8]]| {
            let count = writer.then(op::WAIT_ANY).number(keys.len() as i64);
            keys.iter().fold(count, |writer, key| writer.string(key)).finish()
        };
        let found = |rank: &mut Rank, value: &[u8]| {
            assert_eq!(rank.bytes(), [0]);
            assert_eq!(rank.number(), 0);
            assert_eq!(rank.string(), value);
        };
        let (verdict, counter) = (self.key("verdict"), self.key("count"));
        let prefix = self.key("here/");
        let arrive = |rank: &Rank| {
            let here = [&prefix[..], rank.number.to_string().as_bytes()].concat();
            let set = Writer::new(op::SET).string(&here).string(call.as_bytes());
            wait(set.then(op::PING).word(0), &[&first, &verdict, &lost, &left])
        };
        let arrived = |rank: &mut Rank| {
            assert_eq!(rank.bytes(), 0u32.to_le_bytes());
            found(rank, call.as_bytes());
        };
        each(&mut self.ranks, arrive, arrived);
        let world = self.world as i64;
        let count = |writer: Writer, counter: &[u8], verdict: &[u8]| {
            let count = writer.then(op::COUNT).string(counter).number(1).number(world);
            wait(count.string(verdict).string(AGREED), &[verdict, &lost, &left])
        };
        let agreed = |rank: &mut Rank| {
            assert!(rank.number() > 0);
            found(rank, AGREED);
        };
        each(&mut self.ranks, |_| count(Writer::default(), &counter, &verdict), agreed);
        lap("agree", &mut began);

        // The call's end: the note, the count and the wait are one request of each rank. Then each
        // rank says that it has read the verdict.
        let (prefix, verdict, counter) = (self.key("end/here/"), self.key("end/verdict"), self.key("end/count"));
        let end = |rank: &Rank| {
            let here = [&prefix[..], rank.number.to_string().as_bytes()].concat();
            count(Writer::new(op::SET).string(&here).string(b"done"), &counter, &verdict)
        };
        each(&mut self.ranks, end, agreed);
        let (read, all) = (self.key("end/read"), self.key("end/all"));
        let say = |_: &Rank| {
            let count = Writer::new(op::COUNT).string(&read).number(1).number(world - 1);
            count.string(&all).string(b"1").finish()
        };
        each(&mut self.ranks, say, |rank| assert!(rank.number() > 0));
        lap("end", &mut began);
        self.idle();
    }

    fn agree_with_any(mut self) {
        let mut began = Instant::now();
        let (call, first, prefix) = (self.call(), self.key("here/0"), self.key("here/"));
        // Arrive, and read what rank 0 was asked.
        let arrive = |rank: &Rank| {
            let here = [&prefix[..], rank.number.to_string().as_bytes()].concat();
            let set = Writer::new(op::SET).string(&here).string(call.as_bytes());
            set.then(op::WAIT).number(1).string(&first).finish()
        };
        each(&mut self.ranks, arrive, |rank| assert_eq!(rank.bytes(), [0]));
        let read = |_: &Rank| Writer::new(op::GET).string(&first).finish();
        each(&mut self.ranks, read, |rank| assert_eq!(rank.string(), call.as_bytes()));
        let (count, verdict) = (self.key("count"), self.key("verdict"));
        settle(&mut self.ranks, self.world, &count, &verdict);
        lap("agree", &mut began);

        // The call's end: arrive again, count, read the verdict, and say that it was read.
        let prefix = self.key("end/here/");
        let arrive = |rank: &Rank| {
            let here = [&prefix[..], rank.number.to_string().as_bytes()].concat();
            Writer::new(op::SET).string(&here).string(b"done").then(op::PING).word(7).finish()
        };
        each(&mut self.ranks, arrive, |rank| assert_eq!(rank.bytes(), 7u32.to_le_bytes()));
        let (count, verdict) = (self.key("end/count"), self.key("end/verdict"));
        settle(&mut self.ranks, self.world, &count, &verdict);
        let counter = self.key("end/read");
        let read = |_: &Rank| Writer::new(op::ADD).string(&counter).number(1).finish();
        each(&mut self.ranks, read, |rank| assert!(rank.number() > 0));
        lap("end", &mut began);
        self.idle();
    }
}

/// Counts everybody in; the last one writes the verdict that all wait for.
fn settle(ranks: &mut [Rank], world: usize, count: &[u8], verdict: &[u8]) {
    let mut last = None;
    for (index, rank) in ranks.iter_mut().enumerate() {
        rank.send(&Writer::new(op::ADD).string(count).number(1).finish());
        if rank.number() == world as i64 {
            last = Some(index);
        }
    }
    if let Some(last) = last {
        let rank = &mut ranks[last];
        rank.send(&Writer::new(op::COMPARE_SET).string(verdict).string(b"").string(AGREED).finish());
        assert_eq!(rank.string(), AGREED);
    }
    let wait = |_: &Rank| Writer::new(op::WAIT).number(1).string(verdict).finish();
    each(ranks, wait, |rank| assert_eq!(rank.bytes(), [0]));
    let read = |_: &Rank| Writer::new(op::GET).string(verdict).finish();
    each(ranks, read, |rank| assert_eq!(rank.string(), AGREED));
}

/// Every rank asks, then every rank is answered: the server has all the questions at once, as in a
/// real start.
fn each(ranks: &mut [Rank], question: impl Fn(&Rank) -> Vec<u8>, answer: impl Fn(&mut Rank)) {
    for rank in ranks.iter_mut() {
        let bytes = question(rank);
        rank.send(&bytes);
    }
    ranks.iter_mut().for_each(answer);
}
