//! Reads and writes of sockets without blocking, and the kernel's knowledge about connections.

use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::time::Duration;

use socket2::Socket;

/// Turns the answer of a system call into a number of bytes; `None` where the call would block.
fn moved(answer: isize) -> io::Result<Option<usize>> {
    if answer >= 0 {
        return Ok(Some(answer as usize));
    }
    let reason = io::Error::last_os_error();
    match reason.kind() {
        // The caller tries again later.
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(None),
        _ => Err(reason),
    }
}

/// Reads the bytes that have arrived, and puts them into these parts of memory. Returns 0 where the
/// other side has closed the connection, and `None` where nothing has come.
///
/// # Safety
/// The parts are valid, and nobody else touches them.
pub(super) unsafe fn receive(socket: &Socket, parts: &mut [libc::iovec]) -> io::Result<Option<usize>> {
    // SAFETY: an all-zero header is valid, and the caller vouches for the parts.
    moved(unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len() as _;
        libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT)
    })
}

/// Writes two parts one after the other. Returns `None` where there is no room.
pub(super) fn send(socket: &Socket, head: &[u8], payload: &[u8]) -> io::Result<Option<usize>> {
    let part = |bytes: &[u8]| libc::iovec { iov_base: bytes.as_ptr() as *mut libc::c_void, iov_len: bytes.len() };
    let parts = [part(head), part(payload)];
    // SAFETY: an all-zero header is valid, and the kernel only reads the parts.
    moved(unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = parts.as_ptr().cast_mut();
        message.msg_iovlen = parts.len() as _;
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
    })
}

/// Whether the other host has everything that was written to a socket.
pub(super) fn is_sent(socket: &Socket) -> bool {
    let mut left: libc::c_int = 0;
    // SAFETY: the kernel writes the number of bytes that are not acknowledged.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut left) };
    answer != 0 || left == 0
}

/// Makes the kernel acknowledge at once the data that have come. Otherwise the kernel may wait for
/// 40 ms, to send the acknowledgement together with an answer.
pub(super) fn acknowledge(socket: &Socket) {
    let yes: libc::c_int = 1;
    // SAFETY: the kernel reads the number.
    unsafe {
        let (value, bytes) = ((&raw const yes).cast(), size_of::<libc::c_int>() as libc::socklen_t);
        libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_QUICKACK, value, bytes);
    }
}

/// The option by which a socket limits the pause between two sends of a lost packet, in
/// milliseconds (from Linux 6.15 on).
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// Makes the kernel send a lost packet again after a pause of `longest` at most. The kernel doubles
/// the pause after each try, up to 120 s otherwise. Older kernels refuse the option, which does no
/// harm.
pub(super) fn limit_pause(socket: &Socket, longest: Duration) {
    // The kernel refuses pauses of less than a second.
    let millis = longest.as_millis().clamp(1000, 120_000) as libc::c_int;
    // SAFETY: the kernel reads the number.
    unsafe {
        let (value, bytes) = ((&raw const millis).cast(), size_of::<libc::c_int>() as libc::socklen_t);
        libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, TCP_RTO_MAX_MS, value, bytes);
    }
}

/// The limit that [`limit_pause`] has set, in milliseconds; `None` where the kernel has no limit.
#[cfg(test)]
pub(super) fn longest_pause(socket: &Socket) -> Option<libc::c_int> {
    let (mut millis, mut bytes): (libc::c_int, _) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the kernel writes the number and its length.
    let answer = unsafe {
        let value = (&raw mut millis).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, TCP_RTO_MAX_MS, value, &raw mut bytes)
    };
    (answer == 0).then_some(millis)
}

/// The number of 32-bit words that are read of the kernel's `struct tcp_info`.
const INFO_WORDS: usize = 38;
/// The index of the word of `struct tcp_info` that has `tcpi_segs_in` (from Linux 4.2 on).
const SEGMENTS_IN: usize = 35;
/// The index of the word that has `tcpi_min_rtt`, in microseconds (from Linux 4.6 on).
const LEAST_ROUND_TRIP: usize = 37;

/// Returns one word of the kernel's knowledge about a connection, or `None` where the kernel is too
/// old to tell.
fn info(socket: &Socket, word: usize) -> Option<u32> {
    let mut info = [0_u32; INFO_WORDS];
    let mut bytes = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the kernel writes as many bytes into the array as `bytes` says, and changes `bytes`.
    let answer = unsafe {
        let (level, info, bytes) = (libc::IPPROTO_TCP, info.as_mut_ptr().cast(), &raw mut bytes);
        libc::getsockopt(socket.as_raw_fd(), level, libc::TCP_INFO, info, bytes)
    };
    let is_told = answer == 0 && bytes as usize >= (word + 1) * size_of::<u32>();
    is_told.then(|| info[word])
}

/// Returns how many segments have come from the other host, or `None` where the kernel does not
/// tell. Acknowledgements and answers to probes count.
pub(super) fn segments_in(socket: &Socket) -> Option<u32> {
    info(socket, SEGMENTS_IN)
}

/// Returns the shortest round trip to the other host that the kernel has seen on a connection, or
/// `None` where the kernel does not tell or has not seen any.
pub(super) fn least_round_trip(socket: &Socket) -> Option<Duration> {
    // A connection without a measured round trip has all bits set.
    info(socket, LEAST_ROUND_TRIP)
        .filter(|micros| *micros != u32::MAX)
        .map(|micros| Duration::from_micros(micros.into()))
}
