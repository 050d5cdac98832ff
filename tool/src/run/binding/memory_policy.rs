//! The NUMA memory policy of the calling thread. A process that the thread starts inherits it, also
//! over exec.

use std::ffi::{c_long, c_ulong};

const BITS: usize = c_ulong::BITS as usize;
/// The number of NUMA nodes in a mask. No kernel has more than 1024 (CONFIG_NODES_SHIFT is at most
/// 10).
const WORDS: usize = 1024 / BITS;

/// Whether this process has the kernel's default policy. Another policy comes from the process
/// that started the tool, numactl for example. The tool leaves such a policy as it is.
pub fn is_default() -> bool {
    // A line of this file is: the address, the policy, and details.
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
    !maps.is_empty() && maps.lines().all(|line| line.split(' ').nth(1) == Some("default"))
}

/// Makes the kernel take memory from that NUMA node as long as the node has free memory, and then
/// from others. Returns whether the kernel does so.
///
/// The kernel's default takes memory from the node of the CPU that first writes a page. With this
/// policy the memory stays near even when the program binds a thread elsewhere, and automatic NUMA
/// balancing does not unmap pages to see who uses them.
pub fn prefer(node: u32) -> bool {
    let mut mask = [0; WORDS];
    let Some(word) = mask.get_mut(node as usize / BITS) else { return false };
    *word = 1 << (node as usize % BITS);
    set(libc::MPOL_PREFERRED, &mask)
}

/// Returns to the kernel's default.
pub fn reset() {
    set(libc::MPOL_DEFAULT, &[0; WORDS]);
}

/// A refusal (seccomp in containers, a kernel without NUMA) is no error, because the default policy
/// also takes memory near the CPUs to which a rank is bound.
#[expect(unsafe_code, reason = "no safe interface sets the memory policy")]
fn set(mode: i32, mask: &[c_ulong; WORDS]) -> bool {
    // The kernel reads one bit less than this number.
    let bits = WORDS * BITS + 1;
    // SAFETY: set_mempolicy reads the mask, which has this number of bits but one, and writes
    // nothing.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, c_long::from(mode), mask.as_ptr(), bits) == 0 }
}
