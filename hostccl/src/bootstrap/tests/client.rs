//! A rank gets an error with the reason when the maker of its unique id refuses it, sends garbage
//! or goes away.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{greeting, member};
use crate::bootstrap::client::Client;
use crate::bootstrap::greeting::{ANSWER_BYTES, HELLO_BYTES, PROOF_BYTES, Status};
use crate::bootstrap::message::{Message, Stage};
use crate::bootstrap::{link, server};
use crate::error::{Error, Result};
use crate::segment;
use crate::types::*;
use crate::wire::ADDRESS_BYTES;

const TOKEN: [u8; 16] = [4; 16];
const NONCE: [u8; 16] = [2; 16];

/// Returns a rank's connection to a maker, the maker's address and its thread. The maker hands each
/// connection that it accepts to the next of these functions.
fn rank_of(serve: Vec<fn(TcpStream)>) -> (Client, SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let maker = std::thread::spawn(move || serve.into_iter().for_each(|serve| serve(listener.accept().unwrap().0)));
    (Client::new(address, TOKEN, Message::Register(member(0, 2))), address, maker)
}

/// Polls until there is a message or an error.
fn outcome(client: &mut Client) -> Result<Message> {
    let began = Instant::now();
    loop {
        if let Some(message) = client.poll()? {
            return Ok(message);
        }
        assert!(began.elapsed() < Duration::from_secs(60), "nothing comes: {client:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn error_of(serve: fn(TcpStream)) -> (Error, SocketAddr) {
    let (mut client, address, maker) = rank_of(vec![serve]);
    let error = outcome(&mut client).unwrap_err();
    maker.join().unwrap();
    (error, address)
}

/// Answers a rank's greeting with this status, and with a proof that the maker knows the token, if
/// there is a token.
fn answer(mut socket: &TcpStream, status: u8, token: Option<[u8; 16]>) {
    let mut hello = [0; HELLO_BYTES];
    socket.read_exact(&mut hello).unwrap();
    let mut answer = greeting::answer(Status::Welcome, None, &hello, &NONCE);
    if let Some(known) = Status::of(status) {
        answer = greeting::answer(known, token.as_ref(), &hello, &NONCE);
    }
    answer[0] = status;
    socket.write_all(&answer[..ANSWER_BYTES]).unwrap();
}

/// Serves one join in the maker's place: welcomes the first rank that connects, and sends these
/// messages. Returns the connection, which ends when it is dropped.
pub(crate) fn serve(listener: &TcpListener, token: [u8; 16], messages: &[Message]) -> TcpStream {
    let mut socket = listener.accept().unwrap().0;
    answer(&socket, Status::Welcome as u8, Some(token));
    for message in messages {
        socket.write_all(&link::frame(message)).unwrap();
    }
    socket
}

/// The maker's side of one connection, in a test of other modules.
pub(crate) struct Maker(TcpStream);

impl Maker {
    /// Welcomes the first rank that connects.
    pub(crate) fn accept(listener: &TcpListener, token: [u8; 16]) -> Maker {
        let mut socket = listener.accept().unwrap().0;
        answer(&socket, Status::Welcome as u8, Some(token));
        socket.read_exact(&mut [0; PROOF_BYTES]).unwrap();
        Maker(socket)
    }

    pub(crate) fn send(&mut self, message: &Message) {
        self.0.write_all(&link::frame(message)).unwrap();
    }

    /// Returns the next message of the rank.
    pub(crate) fn read(&mut self) -> Message {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).unwrap();
        let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
        self.0.read_exact(&mut bytes).unwrap();
        Message::decode(&bytes).unwrap()
    }
}

/// Welcomes a rank, and returns when the rank has registered.
fn welcome(mut socket: &TcpStream) {
    answer(socket, Status::Welcome as u8, Some(TOKEN));
    let mut registered = vec![0; PROOF_BYTES + link::frame(&Message::Register(member(0, 2))).len()];
    socket.read_exact(&mut registered).unwrap();
}

#[test]
fn a_refusal_says_what_to_do() {
    let refusals: [(fn(TcpStream), _); 4] = [
        (
            |socket| answer(&socket, Status::UnknownId as u8, None),
            "the unique id is used up, or its maker has given it up: the process at ADDRESS does not know it any more; one id starts one communicator",
        ),
        (
            |socket| answer(&socket, Status::RankHasNoSecret as u8, Some(TOKEN)),
            "the maker of the unique id has DM_STORE_SECRET set, and this process has not: set it to the same secret on all ranks",
        ),
        (
            |socket| answer(&socket, Status::MakerHasNoSecret as u8, Some(TOKEN)),
            "this process has DM_STORE_SECRET set, and the maker of the unique id has not: set it to the same secret on all ranks",
        ),
        (
            |socket| answer(&socket, Status::OtherVersion as u8, Some(TOKEN)),
            "another version of hostccl made the unique id: all ranks need the same library",
        ),
    ];
    for (serve, message) in refusals {
        let (error, address) = error_of(serve);
        assert_eq!(error.message(), message.replace("ADDRESS", &address.to_string()));
        assert_eq!(error.code(), ncclInvalidUsage, "{message}");
    }
}

/// After the maker has ended, another program may listen at its port. Or an attacker may want to
/// keep a rank out.
#[test]
fn an_answer_without_a_proof_is_not_the_makers() {
    let others: [fn(TcpStream); 3] = [
        |socket| answer(&socket, Status::Welcome as u8, Some([5; 16])),
        |socket| answer(&socket, Status::OtherVersion as u8, Some([5; 16])),
        |socket| answer(&socket, b'H', None),
    ];
    for serve in others {
        let (error, address) = error_of(serve);
        assert_eq!(error.message(), format!("the process at {address} is not the one that made the unique id"));
        assert_eq!(error.code(), ncclRemoteError);
    }
}

#[test]
fn garbage_of_the_maker_ends_the_join() {
    let garbage: [(fn(TcpStream), _); 2] = [
        (
            |mut socket| {
                welcome(&socket);
                socket.write_all(&[&3_u32.to_le_bytes()[..], b"???"].concat()).unwrap();
            },
            "3 bytes came that are no message",
        ),
        (
            |mut socket| {
                welcome(&socket);
                socket.write_all(&u32::MAX.to_le_bytes()).unwrap();
            },
            "a message of 4294967295 bytes came, and at most ",
        ),
    ];
    for (serve, why) in garbage {
        let (error, address) = error_of(serve);
        let start = format!("the maker of the unique id, at {address}: {why}");
        assert!(error.message().starts_with(&start) && error.code() == ncclRemoteError, "{}", error.message());
    }
}

#[test]
fn a_maker_that_goes_after_the_registration_is_missed() {
    let (error, address) = error_of(|socket| welcome(&socket));
    let gone = format!(
        "the process that made the unique id, at {address}, ended or became unreachable before all ranks had joined"
    );
    assert_eq!((error.code(), error.message()), (ncclRemoteError, &*gone));
}

/// A maker that can open no more files, or that has too many connections, may close the connection
/// of a rank whose proof is on its way. The rank connects again.
#[test]
fn a_connection_that_is_closed_before_the_first_message_of_the_maker_is_made_again() {
    let (mut client, address, maker) =
        rank_of(vec![|socket| answer(&socket, Status::Welcome as u8, Some(TOKEN)), |mut socket| {
            welcome(&socket);
            socket.write_all(&link::frame(&Message::Go)).unwrap();
        }]);
    assert_eq!(outcome(&mut client).unwrap(), Message::Go);
    let failure = client.last_failure().unwrap();
    assert!(failure.starts_with(&address.to_string()), "{failure}");
    maker.join().unwrap();
}

#[test]
fn a_maker_that_goes_after_its_first_message_is_missed() {
    let (mut client, address, maker) = rank_of(vec![|mut socket| {
        welcome(&socket);
        socket.write_all(&link::frame(&Message::StageDone(Stage::Registering, vec![0]))).unwrap();
    }]);
    assert!(matches!(outcome(&mut client).unwrap(), Message::StageDone(..)));
    let error = outcome(&mut client).unwrap_err();
    assert!(error.message().contains("ended or became unreachable"), "{}", error.message());
    assert!(error.message().contains(&address.to_string()) && error.code() == ncclRemoteError);
    maker.join().unwrap();
}

/// The maker closes connections when it has too many. The rank connects again.
#[test]
fn a_connection_that_is_closed_before_the_answer_is_made_again() {
    let (mut client, address, maker) = rank_of(vec![drop, drop, |mut socket| {
        welcome(&socket);
        socket.write_all(&link::frame(&Message::Go)).unwrap();
    }]);
    assert_eq!(client.last_failure(), None);
    assert_eq!(outcome(&mut client).unwrap(), Message::Go);
    assert!(client.is_ready() && client.has_sent_first());
    let failure = client.last_failure().unwrap();
    assert!(failure.starts_with(&address.to_string()), "{failure}");
    maker.join().unwrap();
}

/// A rank that leaves tries longer where the maker's host has taken its connection. The maker may
/// only wait for a processor.
#[test]
fn a_maker_that_answers_late_learns_of_a_rank_that_leaves() {
    const LONGEST: Duration = Duration::from_secs(1);
    let (mut client, _, maker) = rank_of(vec![|mut socket| {
        std::thread::sleep(2 * LONGEST);
        answer(&socket, Status::Welcome as u8, Some(TOKEN));
        socket.read_exact(&mut [0; PROOF_BYTES]).unwrap();
        assert!(matches!(Maker(socket).read(), Message::Failed(error) if error.message() == "it leaves"));
    }]);
    client.refuse(&Error::new(ncclSystemError, "it leaves"), LONGEST);
    // The maker reads no more than the client has sent so far.
    drop(client);
    maker.join().unwrap();
}

#[test]
fn a_rank_that_leaves_waits_only_so_long_for_a_maker_that_is_silent() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = Client::new(silent.local_addr().unwrap(), TOKEN, Message::Register(member(0, 2)));
    let began = Instant::now();
    client.refuse(&Error::new(ncclSystemError, "it leaves"), Duration::from_millis(20));
    assert!(!client.has_sent_first() && began.elapsed() >= Duration::from_millis(200), "{:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

/// The maker accepts the longest address that a wire may have.
#[test]
fn a_rank_with_a_long_address_registers() {
    let token = crate::token::random_token().unwrap();
    let fd = segment::create(token).unwrap();
    let address = server::open(token, &fd).unwrap();
    let mut registered = member(0, 1);
    registered.contact.address = vec![5; ADDRESS_BYTES];
    let mut client = Client::new(address, token, Message::Register(registered.clone()));
    let table = loop {
        match outcome(&mut client).unwrap() {
            Message::StageDone(..) => {}
            message => break message,
        }
    };
    assert!(matches!(table, Message::Table { members, .. } if members == [registered]));
    server::close(token, None);
}

/// Names the address of the maker to the process that the next test starts.
const MAKER: &str = "HOSTCCL_TEST_MAKER";

/// The process that the next test starts. It can open no more files when it begins to connect.
#[test]
#[ignore = "the next test starts it"]
fn short_of_files() {
    let Ok(address) = std::env::var(MAKER) else { return };
    let mut client = Client::new(address.parse().unwrap(), TOKEN, Message::Register(member(0, 2)));
    let next = std::fs::File::open("/dev/null").unwrap();
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let raw = std::os::fd::AsRawFd::as_raw_fd(&next) as libc::rlim_t;
    drop(next);
    // SAFETY: the kernel writes and reads the limits.
    let mut limit = |count: Option<libc::rlim_t>| unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limits), 0);
        limits.rlim_cur = count.unwrap_or(limits.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits), 0);
    };
    limit(Some(raw));
    assert_eq!(client.poll(), Ok(None));
    let why = client.last_failure().unwrap();
    assert!(why.contains("opening a connection") && why.contains("raise `ulimit -n`"), "{why}");
    limit(None);
    assert!(matches!(outcome(&mut client), Ok(Message::Go)));
}

#[test]
fn a_rank_that_can_open_no_more_files_for_a_moment_joins() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "bootstrap::tests::client::short_of_files", "--ignored", "--nocapture"]);
    let mut child = command.env(MAKER, listener.local_addr().unwrap().to_string()).spawn().unwrap();
    listener.set_nonblocking(true).unwrap();
    let began = Instant::now();
    let mut socket = loop {
        match listener.accept() {
            Ok((socket, _)) => break socket,
            Err(error) => {
                let ended = child.try_wait().unwrap();
                assert!(ended.is_none() && began.elapsed() < Duration::from_secs(60), "{ended:?}, {error}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    };
    socket.set_nonblocking(false).unwrap();
    answer(&socket, Status::Welcome as u8, Some(TOKEN));
    socket.write_all(&link::frame(&Message::Go)).unwrap();
    assert!(child.wait().unwrap().success());
}
