//! The start of a job of thousands of ranks as its store sees it: every rank connects, greets,
//! agrees on the join of the world, and then on a mesh. benches/store_start.py runs it against our
//! store and PyTorch's in turn.
//!
//! `serve <ranks>`: serves until its input ends; prints the port. `drive <port> <first> <end>
//! <world> <run> <form>`: plays the ranks first..end of world. It prints one line `<phase>
//! <seconds>` for each phase when all its ranks are through. With the form `ours` the ranks send
//! what this library sends to a server of its own, each on a connection of its own. With `relays`
//! eight ranks at a time share a connection, as the ranks of a node with a relay do. With `torch`
//! they send the same agreements in the operations of PyTorch's protocol, which both servers know.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::rc::Rc;
use std::time::Instant;

use devicemesh::rendezvous::store::Server;
use devicemesh::rendezvous::store::frame::{Writer, op};

const HELLO: [u8; 10] = [0, 0xce, 0xf7, 0x85, 0x3c, 13, 1, 2, 3, 4];
const AGREED: &[u8] = b"0 0 0 0\n";
/// The length of NCCL's unique id.
const ID: usize = 128;
/// How many ranks share a connection where there are relays.
const RANKS_OF_A_NODE: usize = 8;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    raise_descriptor_limit();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", ranks] => serve(ranks.parse().expect("a number")),
        ["drive", port, first, end, world, run, form @ ("ours" | "relays" | "torch")] => {
            let number = |text: &str| text.parse::<usize>().expect("a number");
            let ranks = connect(number(port) as u16, number(first)..number(end), form == "relays");
            Start { ranks, world: number(world), run: run.to_owned(), to_ours: form != "torch" }.run();
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
    link: Link,
}

/// How the bytes of a rank come and go.
enum Link {
    Own(TcpStream),
    Channel(Rc<RefCell<Trunk>>, u32),
}

/// The connection of a relay (src/rendezvous/store/channels.rs). The few bytes of a start fill no
/// window.
struct Trunk {
    stream: TcpStream,
    /// What has come for each channel.
    inboxes: HashMap<u32, Vec<u8>>,
}

impl Trunk {
    fn begin(&mut self, channel: u32) {
        let frame = [channel.to_le_bytes(), (1u32 << 31).to_le_bytes()].concat();
        self.stream.write_all(&frame).expect("the server listens");
    }

    fn send(&mut self, channel: u32, bytes: &[u8]) {
        let header = [channel.to_le_bytes(), (bytes.len() as u32).to_le_bytes()].concat();
        self.stream.write_all(&[&header, bytes].concat()).expect("the server listens");
    }

    fn receive(&mut self, channel: u32, buffer: &mut [u8]) {
        while self.inboxes.get(&channel).is_none_or(|inbox| inbox.len() < buffer.len()) {
            let mut header = [0; 8];
            self.stream.read_exact(&mut header).expect("the server answers");
            let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
            let mut bytes = vec![0; word(4) as usize];
            self.stream.read_exact(&mut bytes).expect("the server answers");
            self.inboxes.entry(word(0)).or_default().extend(bytes);
        }
        let inbox = self.inboxes.entry(channel).or_default();
        buffer.copy_from_slice(&inbox[..buffer.len()]);
        inbox.drain(..buffer.len());
    }
}

impl Rank {
    fn send(&mut self, bytes: &[u8]) {
        match &mut self.link {
            Link::Own(stream) => stream.write_all(bytes).expect("the server listens"),
            Link::Channel(trunk, channel) => trunk.borrow_mut().send(*channel, bytes),
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) {
        match &mut self.link {
            Link::Own(stream) => stream.read_exact(buffer).expect("the server answers"),
            Link::Channel(trunk, channel) => trunk.borrow_mut().receive(*channel, buffer),
        }
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.receive(&mut bytes);
        bytes
    }

    fn number(&mut self) -> i64 {
        i64::from_le_bytes(self.bytes())
    }

    fn string(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; self.number() as usize];
        self.receive(&mut bytes);
        bytes
    }
}

/// Prints how long the phase took, and begins the next one.
fn lap(phase: &str, began: &mut Instant) {
    println!("{phase} {:.6}", began.elapsed().as_secs_f64());
    *began = Instant::now();
}

fn connect(port: u16, ranks: std::ops::Range<usize>, by_relays: bool) -> Vec<Rank> {
    let mut began = Instant::now();
    let stream = |number: usize| {
        // An address of the server has ports for some 28,000 connections from one address.
        let host = IpAddr::from([127, 0, 0, 1 + (number / 20_000) as u8]);
        let stream = TcpStream::connect((host, port)).expect("the server listens");
        stream.set_nodelay(true).expect("a socket");
        stream
    };
    let mut trunk = None;
    let mut ranks: Vec<Rank> = ranks
        .enumerate()
        .map(|(index, number)| {
            let link = match by_relays {
                false => Link::Own(stream(number)),
                true => {
                    if index % RANKS_OF_A_NODE == 0 {
                        trunk = Some(Rc::new(RefCell::new(begin_trunk(stream(number / RANKS_OF_A_NODE)))));
                    }
                    let trunk = trunk.as_ref().expect("made above");
                    trunk.borrow_mut().begin(number as u32);
                    Link::Channel(Rc::clone(trunk), number as u32)
                }
            };
            let mut rank = Rank { number, link };
            rank.send(&HELLO);
            rank
        })
        .collect();
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.bytes(), [1, 2, 3, 4]));
    lap("connect", &mut began);
    ranks
}

/// Makes a trunk of a connection. A relay greets the server before it begins the trunk.
fn begin_trunk(mut stream: TcpStream) -> Trunk {
    let mut answer = [0; 5];
    stream.write_all(&[&HELLO[..], &[op::TRUNK]].concat()).expect("the server listens");
    stream.read_exact(&mut answer).expect("the server answers");
    assert_eq!(answer, [1, 2, 3, 4, 0]);
    Trunk { stream, inboxes: HashMap::new() }
}

/// The ranks of one process, and the job that they start.
struct Start {
    ranks: Vec<Rank>,
    world: usize,
    run: String,
    /// Whether the ranks send what this library sends to a server of its own.
    to_ours: bool,
}

impl Start {
    fn key(&self, name: &str) -> Vec<u8> {
        format!("/bench/{}/{name}", self.run).into_bytes()
    }

    fn agree(&mut self, call: &str, text: &str) {
        if self.to_ours { self.agree_with_ours(call, text) } else { self.agree_with_any(call, text) }
    }

    fn end(&mut self, call: &str) {
        if self.to_ours { self.end_with_ours(call) } else { self.end_with_any(call) }
    }

    fn run(mut self) {
        let mut began = Instant::now();
        let world = format!("dm_world_init(device_type=cuda, world_size={}, version=0.2.0)\n", self.world);
        let mesh = format!("dm_init(shape=({}, 2, 2, 2), names=(pp, dp, cp, tp))\n", self.world / 8);
        self.agree("world", &world);
        lap("agree", &mut began);
        self.end("world");
        lap("end", &mut began);
        self.agree("mesh", &mesh);
        self.share_id();
        self.end("mesh");
        lap("mesh", &mut began);
        println!("idle");
        let _ = std::io::stdin().read(&mut [0]);
    }

    /// Makes an agreement in two requests of each rank. The first one stores the rank's text and
    /// waits for that of the first rank. The second one counts the rank in and waits for the
    /// verdict. In each wait a rank also waits for two more keys.
    fn agree_with_ours(&mut self, call: &str, text: &str) {
        let key = |name: &str| self.key(&format!("{call}/{name}"));
        let (first, lost, left) = (key("here/0"), self.key("lost/1"), self.key("left/1"));
        let (verdict, counter, prefix) = (key("verdict"), key("count"), key("here/"));
        let arrive = |rank: &Rank| {
            let here = [&prefix[..], rank.number.to_string().as_bytes()].concat();
            let set = Writer::new(op::SET).string(&here).string(text.as_bytes());
            wait_any(set.then(op::PING).word(0), &[&first, &verdict, &lost, &left])
        };
        let arrived = |rank: &mut Rank| {
            assert_eq!(rank.bytes(), 0u32.to_le_bytes());
            found(rank, text.as_bytes());
        };
        each(&mut self.ranks, arrive, arrived);
        let world = self.world as i64;
        let count = |_: &Rank| count_in(Writer::default(), &counter, world, &verdict, &[&verdict, &lost, &left]);
        each(&mut self.ranks, count, agreed);
    }

    /// Ends a call. The note, the count and the wait are one request of each rank. Then each rank
    /// says that it has read the verdict.
    fn end_with_ours(&mut self, call: &str) {
        let key = |name: &str| self.key(&format!("{call}/end/{name}"));
        let (lost, left) = (self.key("lost/1"), self.key("left/1"));
        let (prefix, verdict, counter) = (key("here/"), key("verdict"), key("count"));
        let (read, all) = (key("read"), key("all"));
        let world = self.world as i64;
        let end = |rank: &Rank| {
            let here = [&prefix[..], rank.number.to_string().as_bytes()].concat();
            let set = Writer::new(op::SET).string(&here).string(b"done");
            count_in(set, &counter, world, &verdict, &[&verdict, &lost, &left])
        };
        each(&mut self.ranks, end, agreed);
        let say = |_: &Rank| {
            let count = Writer::new(op::COUNT).string(&read).number(1).number(world - 1);
            count.string(&all).string(b"1").finish()
        };
        each(&mut self.ranks, say, |rank| assert!(rank.number() > 0));
    }

    /// Rank 0 publishes the unique id of the root communicator, and all other ranks read it.
    fn share_id(&mut self) {
        let key = self.key("mesh/data/id");
        if let Some(first) = self.ranks.iter_mut().find(|rank| rank.number == 0) {
            first.send(&Writer::new(op::SET).string(&key).string(&[7; ID]).finish());
        }
        if self.to_ours {
            let (lost, left) = (self.key("lost/1"), self.key("left/1"));
            let wait = |_: &Rank| wait_any(Writer::default(), &[&key, &lost, &left]);
            return each(&mut self.ranks, wait, |rank| found(rank, &[7; ID]));
        }
        let wait = |_: &Rank| Writer::new(op::WAIT).number(1).string(&key).finish();
        each(&mut self.ranks, wait, |rank| assert_eq!(rank.bytes(), [0]));
        let read = |_: &Rank| Writer::new(op::GET).string(&key).finish();
        each(&mut self.ranks, read, |rank| assert_eq!(rank.string(), [7; ID]));
    }

    fn agree_with_any(&mut self, call: &str, text: &str) {
        let key = |name: &str| self.key(&format!("{call}/{name}"));
        let (first, prefix, count, verdict) = (key("here/0"), key("here/"), key("count"), key("verdict"));
        // Arrive, and read what rank 0 was asked.
        let arrive = |rank: &Rank| {
            let here = [&prefix[..], rank.number.to_string().as_bytes()].concat();
            let set = Writer::new(op::SET).string(&here).string(text.as_bytes());
            set.then(op::WAIT).number(1).string(&first).finish()
        };
        each(&mut self.ranks, arrive, |rank| assert_eq!(rank.bytes(), [0]));
        let read = |_: &Rank| Writer::new(op::GET).string(&first).finish();
        each(&mut self.ranks, read, |rank| assert_eq!(rank.string(), text.as_bytes()));
        settle(&mut self.ranks, self.world, &count, &verdict);
    }

    /// Ends a call: arrive again, count, read the verdict, and say that it was read.
    fn end_with_any(&mut self, call: &str) {
        let key = |name: &str| self.key(&format!("{call}/end/{name}"));
        let (prefix, count, verdict, counter) = (key("here/"), key("count"), key("verdict"), key("read"));
        let arrive = |rank: &Rank| {
            let here = [&prefix[..], rank.number.to_string().as_bytes()].concat();
            Writer::new(op::SET).string(&here).string(b"done").then(op::PING).word(7).finish()
        };
        each(&mut self.ranks, arrive, |rank| assert_eq!(rank.bytes(), 7u32.to_le_bytes()));
        settle(&mut self.ranks, self.world, &count, &verdict);
        let read = |_: &Rank| Writer::new(op::ADD).string(&counter).number(1).finish();
        each(&mut self.ranks, read, |rank| assert!(rank.number() > 0));
    }
}

/// Appends a wait for any of the keys.
fn wait_any(writer: Writer, keys: &[&[u8]]) -> Vec<u8> {
    let count = writer.then(op::WAIT_ANY).number(keys.len() as i64);
    keys.iter().fold(count, |writer, key| writer.string(key)).finish()
}

/// Appends a count, in which the last rank of the world stores the verdict, and a wait.
fn count_in(writer: Writer, counter: &[u8], world: i64, verdict: &[u8], keys: &[&[u8]]) -> Vec<u8> {
    let count = writer.then(op::COUNT).string(counter).number(1).number(world);
    wait_any(count.string(verdict).string(AGREED), keys)
}

/// Reads the answer of a wait whose first key has come.
fn found(rank: &mut Rank, value: &[u8]) {
    assert_eq!(rank.bytes(), [0]);
    assert_eq!(rank.number(), 0);
    assert_eq!(rank.string(), value);
}

/// Reads the answers of [`count_in`].
fn agreed(rank: &mut Rank) {
    assert!(rank.number() > 0);
    found(rank, AGREED);
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
