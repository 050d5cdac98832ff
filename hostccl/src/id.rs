//! The unique id. It tells the ranks of a new communicator where to find the segment.

use std::collections::HashMap;
use std::ffi::c_char;
use std::io::ErrorKind;
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use crate::bootstrap::server;
use crate::error::{Error, Result};
use crate::fork::{Inherited, Private};
use crate::host::{self, Host, checksum};
use crate::machine;
use crate::process::{self, ProcessId};
use crate::segment::{self, End, LAYOUT_VERSION};
use crate::token::random_token;
use crate::types::{NCCL_UNIQUE_ID_BYTES, ncclSystemError, ncclUniqueId};
use crate::wire::Token;

/// The first bytes of an id, by which a foreign id is recognised.
const MAGIC: [u8; 8] = *b"hostccl\x01";
/// Where the checksum of the bytes before it lies in an id.
const SUM: usize = 120;

/// Whether the ranks of an id are on one host or on several, as far as its maker knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hosts {
    /// All ranks are on the maker's host. Nobody serves the id.
    One,
    /// The ranks may be on any hosts. Ranks that can open the maker's segment meet in it. When a
    /// rank arrives that cannot open it, all ranks register with the maker.
    Unknown,
    /// The ranks are on several hosts, so they register with the maker at once.
    Several,
}

/// The fields of a unique id. [`Id::to_raw`] writes them into its 128 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id {
    /// The segment's random number, which tells it from another segment at that descriptor. It is
    /// also the secret by which the ranks and the maker prove to each other that they know the id.
    pub(crate) token: Token,
    /// The process that made the id and holds the segment open.
    pub(crate) creator: ProcessId,
    /// The segment's descriptor in that process.
    pub(crate) fd: RawFd,
    /// The number of the maker's host, see [`Host::number`]; 0 where it is unknown.
    host: u64,
    /// The process-id namespace of `creator`, see [`Host::namespace`]; 0 where it is unknown.
    namespace: u64,
    /// Whether the maker shares memory with other processes.
    shares: bool,
    /// Whether the ranks are on one host or on several.
    pub(crate) hosts: Hosts,
    /// Where the maker serves the id; `None` where nobody does.
    pub(crate) address: Option<SocketAddr>,
    /// The number of ranks of the communicator that grows by the id; 0 for an id that starts a
    /// communicator without any other.
    pub(crate) grows_from: u32,
}

/// The way by which a rank joins by an id.
#[derive(Debug)]
pub(crate) enum Way {
    /// The rank maps this segment, which the maker holds open.
    Segment(Private<OwnedFd>),
    /// The rank registers with the maker at this address.
    Connection(SocketAddr),
}

/// The segments of the ids that this process has made and that have not started a communicator yet,
/// by token. A forked child has them, too, because a program may make an id and then fork its
/// ranks.
static OPEN: Inherited<HashMap<Token, OpenId>> = Inherited::new();

/// How long the segment of a failed id stays open, and for how many failed ids. Beyond that number,
/// the oldest ones are closed earlier. Ranks that come late read the reason in the segment.
const KEPT_FAILED: (Duration, usize) = (Duration::from_secs(10), 64);

/// An id that this process has made.
struct OpenId {
    /// The segment.
    fd: OwnedFd,
    /// When this process first saw that the id has failed.
    failed: Option<Instant>,
}

impl Id {
    /// Makes an id and its segment, which stays open until [`Id::close`]. `hosts` says whether the
    /// ranks are on several hosts; `None` where the caller does not know. Unless they are on one
    /// host, a thread of this process serves the id.
    pub(crate) fn create(hosts: Option<bool>) -> Result<Id> {
        let token = random_token()?;
        let fd = segment::create(token)?;
        let host = Host::current()?;
        let mut id = Id {
            token,
            creator: ProcessId::current(),
            fd: fd.as_raw_fd(),
            host: host.number,
            namespace: host.namespace,
            shares: host.shares,
            hosts: match hosts {
                Some(false) => Hosts::One,
                None => Hosts::Unknown,
                Some(true) => Hosts::Several,
            },
            address: None,
            grows_from: 0,
        };
        if id.hosts != Hosts::One {
            match server::open(token, &fd) {
                Ok(address) => id.address = Some(address),
                // Ranks of this host need no address.
                Err(error) if id.hosts == Hosts::Unknown => {
                    log::warn!("ranks on other hosts cannot join by this unique id: {}", error.message());
                }
                Err(error) => return Err(error),
            }
        }
        let mut open = OPEN.lock();
        // A creator that joins closes its id when it has joined. A creator that only makes ids for
        // others closes the old ones here.
        open.retain(|token, id| {
            let stays = match segment::end_of(&id.fd) {
                None => true,
                Some(End::Started) => false,
                Some(End::Failed) => id.failed.get_or_insert_with(Instant::now).elapsed() < KEPT_FAILED.0,
            };
            if !stays {
                server::close(*token, None);
            }
            stays
        });
        let mut failed: Vec<_> = open.iter().filter_map(|(token, id)| Some((id.failed?, *token))).collect();
        failed.sort_unstable();
        for (_, oldest) in failed.iter().rev().skip(KEPT_FAILED.1) {
            open.remove(oldest);
            server::close(*oldest, None);
        }
        open.insert(token, OpenId { fd, failed: None });
        Ok(id)
    }

    /// Returns this id for the growth of a communicator of `nranks` ranks.
    pub(crate) fn for_growth_from(self, nranks: u32) -> Id {
        Id { grows_from: nranks, ..self }
    }

    /// Reads an id. Refuses bytes that no id has, and an id of another version of this library.
    pub(crate) fn parse(raw: &ncclUniqueId) -> Result<Id> {
        let bytes = raw.internal.map(|byte| byte as u8);
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if bytes[..8] != MAGIC {
            return Err(Error::argument(
                "the unique id was not made by hostccl's ncclGetUniqueId: all ranks need the same communicator library",
            ));
        }
        if u32_at(8) != LAYOUT_VERSION {
            return Err(Error::usage(format!(
                "another version of hostccl made the unique id (layout {}, this one has {LAYOUT_VERSION}): all ranks need the same library",
                u32_at(8)
            )));
        }
        let damaged = || Error::argument("the unique id is damaged: copy all of its 128 bytes");
        if u64_at(SUM) != checksum(&bytes[..SUM]) {
            return Err(damaged());
        }
        let port = u16::from_le_bytes([bytes[12], bytes[13]]);
        let octets: [u8; 16] = bytes[64..80].try_into().expect("sixteen bytes");
        let address = match bytes[14] {
            0 => None,
            4 => Some(SocketAddr::from(([octets[0], octets[1], octets[2], octets[3]], port))),
            6 => Some(SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(octets), port, 0, u32_at(80)))),
            _ => return Err(damaged()),
        };
        Ok(Id {
            token: bytes[16..32].try_into().expect("sixteen bytes"),
            creator: ProcessId { pid: u32_at(32), start: u64_at(40) },
            fd: u32_at(36) as RawFd,
            host: u64_at(48),
            namespace: u64_at(56),
            shares: bytes[84] != 0,
            hosts: match bytes[15] {
                0 => Hosts::One,
                1 => Hosts::Unknown,
                2 => Hosts::Several,
                _ => return Err(damaged()),
            },
            address,
            grows_from: u32_at(88),
        })
    }

    /// Returns the 128 bytes of the id.
    pub(crate) fn to_raw(self) -> ncclUniqueId {
        let mut bytes = [0; NCCL_UNIQUE_ID_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&LAYOUT_VERSION.to_le_bytes());
        if let Some(address) = self.address {
            bytes[12..14].copy_from_slice(&address.port().to_le_bytes());
            match address {
                SocketAddr::V4(address) => {
                    bytes[14] = 4;
                    bytes[64..68].copy_from_slice(&address.ip().octets());
                }
                SocketAddr::V6(address) => {
                    bytes[14] = 6;
                    bytes[64..80].copy_from_slice(&address.ip().octets());
                    bytes[80..84].copy_from_slice(&address.scope_id().to_le_bytes());
                }
            }
        }
        bytes[15] = self.hosts as u8;
        bytes[16..32].copy_from_slice(&self.token);
        bytes[32..36].copy_from_slice(&self.creator.pid.to_le_bytes());
        bytes[36..40].copy_from_slice(&(self.fd as u32).to_le_bytes());
        bytes[40..48].copy_from_slice(&self.creator.start.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.host.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.namespace.to_le_bytes());
        bytes[84] = u8::from(self.shares);
        bytes[88..92].copy_from_slice(&self.grows_from.to_le_bytes());
        let sum = checksum(&bytes[..SUM]);
        bytes[SUM..SUM + 8].copy_from_slice(&sum.to_le_bytes());
        ncclUniqueId { internal: bytes.map(|byte| byte as c_char) }
    }

    /// Finds the way by which this process joins. Fails when there is none: the id is for one host,
    /// and was made on another host or in another process-id namespace; or it is used up.
    pub(crate) fn open(&self) -> Result<Way> {
        match (self.hosts, self.address) {
            (Hosts::Several, Some(address)) => return Ok(Way::Connection(address)),
            (Hosts::Unknown, Some(address)) if !self.is_reachable()? => return Ok(Way::Connection(address)),
            _ => {}
        }
        self.open_segment().map(Way::Segment)
    }

    /// Whether this process can open the segment, as far as this is known before the attempt.
    fn is_reachable(&self) -> Result<bool> {
        let host = Host::current()?;
        if self.creator == ProcessId::current() {
            return Ok(true);
        }
        // The maker may belong to another user, and `/proc` may not be that of this process.
        let link = || process::link_of_file(self.creator.pid, self.fd).1;
        let is_denied = || link().is_err_and(|reason| reason.kind() == ErrorKind::PermissionDenied);
        let may_open = || machine::broken_proc().is_none() && !is_denied();
        Ok(host.may_reach(self.host, self.namespace) && host.shares && self.shares && may_open())
    }

    fn open_segment(&self) -> Result<Private<OwnedFd>> {
        if self.creator.pid != std::process::id() {
            if let Some(why) = machine::broken_proc() {
                return Err(Error::new(ncclSystemError, why));
            }
        }
        let host = Host::current()?;
        if host::differ(self.host, host.number) {
            return Err(Error::usage(
                "the unique id was made on another host (or before a reboot), for the ranks of one host only: make it for several hosts",
            ));
        }
        if host::differ(self.namespace, host.namespace) {
            return Err(Error::usage(
                "the unique id was made in another process-id namespace (container), for the ranks of one host only: make it for several hosts",
            ));
        }
        if self.creator != ProcessId::current() && !(host.shares && self.shares) {
            return Err(Error::usage(
                "DM_HOSTCCL_SHM=0 forbids shared memory between processes, and the unique id was made for the ranks of one host only: make it for several hosts",
            ));
        }
        let (pid, fd) = (self.creator.pid, self.fd);
        segment::open(pid, fd, self.token)?.ok_or_else(|| {
            Error::usage(format!(
                "the unique id is used up or its segment is gone (process {pid}, descriptor {fd}): one id starts one communicator, and the process that made the id must live until all ranks have joined"
            ))
        })
    }

    /// Gives the id up, because rank `rank` of this process cannot join; `error` says why. The
    /// ranks in the segment read the reason. If this process made the id, the segment stays open,
    /// so that the ranks that come later read the reason, too. The first `Id::create` after the
    /// failure notes the time. A later `Id::create`, 10 seconds or more after that time, closes the
    /// segment. If this process cannot open the segment, returns the maker's address: the caller
    /// must then tell the maker.
    #[must_use]
    pub(crate) fn give_up(&self, rank: u32, error: &Error) -> Option<SocketAddr> {
        let mut open = OPEN.lock();
        if let Some(id) = open.get(&self.token) {
            if !segment::fail(&id.fd, rank, error) {
                open.remove(&self.token);
                server::close(self.token, Some(error.clone()));
            }
            return None;
        }
        drop(open);
        match self.open().ok()? {
            Way::Segment(fd) => {
                segment::fail(&fd, rank, error);
                None
            }
            Way::Connection(address) => Some(address),
        }
    }

    /// Closes the segment's descriptor if this process made the id. Nobody can join by the id any
    /// more. `why` is the reason for the ranks that wait, if a rank of this process gives up.
    pub(crate) fn close(&self, why: Option<&Error>) {
        let removed = OPEN.lock().remove(&self.token);
        if removed.is_some() && self.address.is_some() {
            server::close(self.token, why.cloned());
        }
    }
}

#[cfg(test)]
impl Id {
    /// Makes this process forget that it has made the id. Returns the descriptor of the segment.
    pub(crate) fn forget(&self) -> OwnedFd {
        OPEN.lock().remove(&self.token).expect("this process has made the id").fd
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::labels::Labels;
    use crate::types::*;

    /// Returns the segment of an id that was made for one host.
    fn open(id: &Id) -> Result<Private<OwnedFd>> {
        match id.open()? {
            Way::Segment(fd) => Ok(fd),
            Way::Connection(address) => panic!("the id leads to {address}"),
        }
    }

    #[test]
    fn an_id_survives_its_bytes() {
        let id = Id::create(Some(false)).unwrap();
        assert_eq!(Id::parse(&id.to_raw()).unwrap(), id);
        let growing = id.for_growth_from(1023);
        assert_eq!(Id::parse(&growing.to_raw()).unwrap(), growing);
        open(&id).unwrap();
        id.close(None);
        let error = open(&id).unwrap_err();
        assert_eq!(error.code(), ncclInvalidUsage);
        assert!(error.message().contains("used up"), "{}", error.message());
    }

    #[test]
    fn ranks_that_come_after_its_maker_gave_up_read_why() {
        let id = Id::create(Some(false)).unwrap();
        assert_eq!(id.give_up(0, &Error::new(ncclSystemError, "no memory")), None);
        Id::create(Some(false)).unwrap().close(None);
        let error = segment::Segment::map(&open(&id).unwrap(), 2, 1, &Labels::default()).unwrap_err();
        assert_eq!((error.code(), error.lost()), (ncclSystemError, Some(0)));
        assert!(error.message().ends_with("no memory"), "{}", error.message());

        let long_ago = Instant::now().checked_sub(KEPT_FAILED.0).expect("the machine runs for longer");
        OPEN.lock().get_mut(&id.token).unwrap().failed = Some(long_ago);
        Id::create(Some(false)).unwrap().close(None);
        assert!(open(&id).unwrap_err().message().contains("used up"), "the next id closes what failed long ago");
    }

    #[test]
    fn foreign_bytes_are_refused() {
        let zero = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
        assert_eq!(Id::parse(&zero).unwrap_err().code(), ncclInvalidArgument);
        let id = Id::create(Some(false)).unwrap();
        let mut cut = id.to_raw();
        cut.internal[40] ^= 1;
        assert_eq!(Id::parse(&cut).unwrap_err().code(), ncclInvalidArgument);
        let mut newer = id.to_raw();
        newer.internal[8] += 1;
        assert_eq!(Id::parse(&newer).unwrap_err().code(), ncclInvalidUsage);
        id.close(None);
    }

    #[test]
    fn an_id_from_elsewhere_says_so() {
        let id = Id::create(Some(false)).unwrap();
        let host = open(&Id { host: id.host ^ 1, ..id }).unwrap_err();
        assert!(host.message().contains("another host"), "{}", host.message());
        let container = open(&Id { namespace: id.namespace ^ 1, ..id }).unwrap_err();
        assert!(container.message().contains("namespace"), "{}", container.message());
        id.close(None);
    }
}
