//! The start of a job of thousands of ranks as its store sees it: every rank connects, greets,
//! arrives, agrees on a call and ends it, with the operations of this library's agreement in the
//! form that PyTorch's protocol has for them, so that the same run drives both servers.
//! benches/store_start.py runs it against ours and PyTorch's in turn.
//!
//! `serve`: serves until its input ends; prints the port.
//! `drive <port> <first> <end> <world> <run>`: ranks first..end of world, each with a connection
//! of its own; prints one line `<phase> <seconds>` for each phase when all its ranks are through.

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
        ["serve"] => serve(),
        ["drive", port, first, end, world, run] => {
            let number = |text: &str| text.parse::<usize>().expect("a number");
            drive(number(port) as u16, number(first)..number(end), number(world), run);
        }
        _ => println!("store_start: run it through benches/store_start.py (make bench-store)"),
    }
}

fn serve() {
    let server = Server::bind("[::1]:0").expect("a free port");
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

fn drive(port: u16, ranks: std::ops::Range<usize>, world: usize, run: &str) {
    let mut began = Instant::now();
    let mut lap = |phase: &str| {
        println!("{phase} {:.6}", began.elapsed().as_secs_f64());
        began = Instant::now();
    };
    let mut ranks: Vec<Rank> = ranks
        .map(|number| {
            let stream = TcpStream::connect(("::1", port)).expect("the server listens");
            stream.set_nodelay(true).expect("a socket");
            let mut rank = Rank { number, stream };
            rank.send(&HELLO);
            rank
        })
        .collect();
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.bytes(), [1, 2, 3, 4]));
    lap("connect");

    let key = |name: &str| format!("/bench/{run}/{name}").into_bytes();
    let call = format!("dm_world_init(device_type=cuda, world_size={world}, version=0.2.0)\n");
    // Arrive, and read what rank 0 was asked.
    let first = key("here/0");
    let arrive = |rank: &Rank| {
        let here = key(&format!("here/{}", rank.number));
        let set = Writer::new(op::SET).string(&here).string(call.as_bytes());
        set.then(op::WAIT).number(1).string(&first).finish()
    };
    each(&mut ranks, arrive, |rank| assert_eq!(rank.bytes(), [0]));
    let read = |_: &Rank| Writer::new(op::GET).string(&first).finish();
    each(&mut ranks, read, |rank| assert_eq!(rank.string(), call.as_bytes()));
    settle(&mut ranks, world, &key("count"), &key("verdict"));
    lap("agree");

    // The call's end: arrive again, count, read the verdict, and say that it was read.
    let arrive = |rank: &Rank| {
        let here = key(&format!("end/here/{}", rank.number));
        Writer::new(op::SET).string(&here).string(b"done").then(op::PING).word(7).finish()
    };
    each(&mut ranks, arrive, |rank| assert_eq!(rank.bytes(), 7u32.to_le_bytes()));
    settle(&mut ranks, world, &key("end/count"), &key("end/verdict"));
    let read = |_: &Rank| Writer::new(op::ADD).string(&key("end/read")).number(1).finish();
    each(&mut ranks, read, |rank| assert!(rank.number() > 0));
    lap("end");
    // Idle now, so that the server's memory can be read.
    println!("idle");
    let _ = std::io::stdin().read(&mut [0]);
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
