//! The messages of a join, and their encoding in bytes. The reader trusts nothing: it checks each
//! length against the bytes that are there.

use crate::blame::Blame;
use crate::cut::cut;
use crate::error::Error;
use crate::process::ProcessId;
use crate::segment::MAX_RANKS;
use crate::types::*;
use crate::wire::{ADDRESS_BYTES, Contact};

/// The longest text of a failure, in bytes. The writer cuts a longer text.
const TEXT_BYTES: usize = 2048;
/// The longest message of the maker, in bytes. A table of 1024 ranks fits. A rank accepts it only
/// from the process that has proved to know the id's token.
pub(super) const MESSAGE_BYTES: usize = 32 << 20;
const _: () = assert!(MAX_RANKS as usize * (ADDRESS_BYTES + 256) < MESSAGE_BYTES);
/// The longest message of a rank, in bytes: its registration, or a failure. The maker accepts it
/// only from a rank that has proved to know the id's token.
pub(super) const RANK_MESSAGE_BYTES: usize = 20 << 10;
const _: () = assert!(ADDRESS_BYTES + 256 < RANK_MESSAGE_BYTES);
const _: () = assert!(2 * 4 * MAX_RANKS as usize + TEXT_BYTES + 256 < RANK_MESSAGE_BYTES);

/// The facts that a rank tells the others about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member {
    /// The rank in the communicator.
    pub(crate) rank: u32,
    /// The number of ranks that the rank's program passed to its call.
    pub(crate) nranks: u32,
    /// The rank's process.
    pub(crate) process: ProcessId,
    /// The number of the machine on which the rank runs; 0 where it is unknown.
    pub(crate) machine: u64,
    /// The number of the host to which the rank wants to belong: that of the machine and of
    /// `DM_HOSTCCL_HOST`; 0 where it is unknown.
    pub(crate) host: u64,
    /// The process-id namespace of the rank; 0 where it is unknown.
    pub(crate) namespace: u64,
    /// Whether the rank may share memory with other processes.
    pub(crate) shares: bool,
    /// The descriptor of the segment that the rank offers.
    pub(crate) fd: i32,
    /// The token of that segment.
    pub(crate) token: [u8; 16],
    /// How other processes reach the wire of the rank's process.
    pub(crate) contact: Contact,
}

/// A stage of the join. Each rank reaches a stage at its own time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// Ranks register.
    Registering,
    /// Ranks open the segment of a rank of their host, and say whose it is.
    Opening,
    /// Ranks map the segments of their hosts.
    Mapping,
    /// All ranks have mapped their segments. The join is over.
    Over,
}

/// A message between a rank and the maker of the unique id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// A rank registers.
    Register(Member),
    /// These ranks have done their part in that stage.
    StageDone(Stage, Vec<u32>),
    /// All ranks have registered.
    Table {
        /// The number of the communicator in the tags of the wire.
        comm: u64,
        /// The ranks in their order.
        members: Vec<Member>,
    },
    /// The sender has opened the segment that the rank with this number offers.
    Opened(u32),
    /// For each rank, the rank whose segment it has opened.
    Groups(Vec<u32>),
    /// The rank has mapped the segment of its host and has its seat.
    Mapped,
    /// All ranks have mapped their segments, so each may use the communicator.
    Go,
    /// The join is over without a communicator.
    Failed(Error),
}

/// Bytes that are being written.
#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, value: u8) -> &mut Writer {
        self.0.push(value);
        self
    }

    fn u32(&mut self, value: u32) -> &mut Writer {
        self.bytes(&value.to_le_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Writer {
        self.bytes(&value.to_le_bytes())
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Writer {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Writes the length and the bytes.
    fn sized(&mut self, bytes: &[u8]) -> &mut Writer {
        self.u32(bytes.len() as u32).bytes(bytes)
    }

    /// Writes the number of the values and the values.
    fn list(&mut self, values: impl ExactSizeIterator<Item = u32>) -> &mut Writer {
        self.u32(values.len() as u32);
        for value in values {
            self.u32(value);
        }
        self
    }
}

/// Bytes that are being read. Each function answers `None` where the bytes end too early.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn array<const LENGTH: usize>(&mut self) -> Option<[u8; LENGTH]> {
        self.bytes(LENGTH)?.try_into().ok()
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a length and that many bytes, at most `longest`.
    fn sized(&mut self, longest: usize) -> Option<&'a [u8]> {
        let length = self.u32()? as usize;
        if length <= longest { self.bytes(length) } else { None }
    }

    /// Reads the number of values and the values, at most one for each rank.
    fn list(&mut self) -> Option<Vec<u32>> {
        let count = self.u32()?;
        if count > MAX_RANKS {
            return None;
        }
        (0..count).map(|_| self.u32()).collect()
    }
}

impl Member {
    fn write(&self, out: &mut Writer) {
        out.u32(self.rank).u32(self.nranks).u32(self.process.pid).u64(self.process.start);
        out.u64(self.machine).u64(self.host).u64(self.namespace).u8(u8::from(self.shares));
        out.u32(self.fd as u32).bytes(&self.token).bytes(&self.contact.id).sized(&self.contact.address);
    }

    /// Reads a member. Refuses a rank that is not in `0..nranks`.
    fn read(bytes: &mut Reader<'_>) -> Option<Member> {
        let member = Member {
            rank: bytes.u32()?,
            nranks: bytes.u32()?,
            process: ProcessId { pid: bytes.u32()?, start: bytes.u64()? },
            machine: bytes.u64()?,
            host: bytes.u64()?,
            namespace: bytes.u64()?,
            shares: bytes.u8()? != 0,
            fd: bytes.u32()? as i32,
            token: bytes.array()?,
            contact: Contact { id: bytes.array()?, address: bytes.sized(ADDRESS_BYTES)?.to_vec() },
        };
        (member.rank < member.nranks && member.nranks <= MAX_RANKS).then_some(member)
    }
}

impl Stage {
    fn read(byte: u8) -> Option<Stage> {
        [Stage::Registering, Stage::Opening, Stage::Mapping, Stage::Over].get(usize::from(byte)).copied()
    }
}

impl Message {
    /// Returns the bytes of the message.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            Message::Register(member) => member.write(out.u8(1)),
            Message::StageDone(stage, ranks) => drop(out.u8(2).u8(*stage as u8).list(ranks.iter().copied())),
            Message::Table { comm, members } => {
                out.u8(3).u64(*comm).u32(members.len() as u32);
                members.iter().for_each(|member| member.write(&mut out));
            }
            Message::Opened(rank) => drop(out.u8(4).u32(*rank)),
            Message::Groups(took) => drop(out.u8(5).list(took.iter().copied())),
            Message::Mapped => drop(out.u8(6)),
            Message::Go => drop(out.u8(7)),
            Message::Failed(error) => {
                let blame = error.blame();
                let ranks = |ranks: &[usize]| ranks.iter().map(|rank| *rank as u32).collect::<Vec<u32>>().into_iter();
                out.u8(8).u32(error.code() as u32).list(ranks(&blame.ranks)).list(ranks(&blame.lost));
                out.sized(cut(error.message(), TEXT_BYTES).as_bytes());
            }
        }
        out.0
    }

    /// Reads a message. Returns `None` for bytes that are no message.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Message> {
        let mut bytes = Reader(bytes);
        let message = match bytes.u8()? {
            1 => Message::Register(Member::read(&mut bytes)?),
            2 => Message::StageDone(Stage::read(bytes.u8()?)?, bytes.list()?),
            3 => {
                let (comm, count) = (bytes.u64()?, bytes.u32()?);
                if count > MAX_RANKS {
                    return None;
                }
                let members: Option<Vec<Member>> = (0..count).map(|_| Member::read(&mut bytes)).collect();
                let members = members?;
                let in_order = |(at, member): (usize, &Member)| (member.rank, member.nranks) == (at as u32, count);
                if !members.iter().enumerate().all(in_order) {
                    return None;
                }
                Message::Table { comm, members }
            }
            4 => Message::Opened(bytes.u32()?),
            5 => Message::Groups(bytes.list()?),
            6 => Message::Mapped,
            7 => Message::Go,
            8 => {
                let code = bytes.u32()? as ncclResult_t;
                let ranks = |ranks: Vec<u32>| ranks.into_iter().map(|rank| rank as usize).collect::<Vec<usize>>();
                let blame = Blame { ranks: ranks(bytes.list()?), lost: ranks(bytes.list()?) };
                let text = String::from_utf8_lossy(bytes.sized(TEXT_BYTES)?).into_owned();
                Message::Failed(Error::new(failure_of_another(code), text).by(blame))
            }
            _ => return None,
        };
        bytes.0.is_empty().then_some(message)
    }
}
