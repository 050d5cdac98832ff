//! Explains refusals of the operating system. The texts name the limit or the setting to change.

use std::io;

/// Returns the operating system's text for `error`. Where the remedy is known, the text has it,
/// too.
pub fn explained(error: &io::Error) -> String {
    match advice(error) {
        Some(advice) => format!("{error}: {advice}"),
        None => error.to_string(),
    }
}

/// Returns what to do about an error, or `None` where that is not known.
fn advice(error: &io::Error) -> Option<String> {
    Some(match error.raw_os_error()? {
        libc::EMFILE => match limit(libc::RLIMIT_NOFILE as i32) {
            Some(limit) => format!("this process has as many files open as it may, {limit}: raise `ulimit -n`"),
            None => "this process has as many files open as it may: raise `ulimit -n`".to_owned(),
        },
        libc::ENFILE => "this machine has as many files open as it may: raise the sysctl fs.file-max".to_owned(),
        libc::ENOMEM => no_memory(None),
        _ => return None,
    })
}

/// Returns the text of [`explained`] for a refused request of that many bytes of memory.
pub fn explained_memory(bytes: usize, error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => format!("{error}: {}", no_memory(Some(bytes as u64))),
        _ => explained(error),
    }
}

/// Returns why the kernel refuses memory, and what to do. `needed` is the number of bytes that were
/// asked for, where that is known. Other ranks show the text too, so it names this process.
fn no_memory(needed: Option<u64>) -> String {
    const ELSEWHERE: &str = "memory ran out: look at vm.max_map_count, vm.overcommit_memory and the container's limit";
    let Some(limit) = limit(libc::RLIMIT_AS as i32) else { return format!("address space or {ELSEWHERE}") };
    let pid = std::process::id();
    let mut said = format!("RLIMIT_AS of process {pid} is {limit} bytes");
    let used = address_space();
    if let (Some(used), Some(needed)) = (used, needed) {
        if used.saturating_add(needed) <= limit {
            return format!("{ELSEWHERE} (RLIMIT_AS of process {pid} is not the reason)");
        }
        said += &format!(", {used} are in use, and {needed} more are needed");
    } else if let Some(used) = used {
        said += &format!(", and {used} are in use");
    }
    let enough = used.zip(needed).map(|(used, needed)| used.saturating_add(needed).div_ceil(1024));
    let at_least = enough.map_or_else(String::new, |kib| format!(" to at least {kib} KiB"));
    format!("{said}: raise the limit of that process{at_least} (`ulimit -v`), or remove it with `ulimit -v unlimited`")
}

/// Returns how many bytes of address space this process uses, or `None` where `/proc` does not
/// tell.
fn address_space() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().next()?.parse().ok()?;
    pages.checked_mul(page_bytes() as u64)
}

/// Returns the size of the system's pages in bytes, a power of two.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: the call only asks for a number.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).expect("a system has pages")
}

/// Returns the text of [`explained`] for an error of the system call `call`. If a
/// sandbox may have forbidden the call, the text says so.
pub(crate) fn explained_call(call: &str, error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => {
            format!(
                "{error}: a sandbox (the container's seccomp profile) may forbid {call}, which the host engine needs: allow it"
            )
        }
        _ => explained(error),
    }
}

/// Returns a text that says why a thread could not be started, and what to do.
pub fn no_thread(error: &io::Error) -> String {
    let said = format!("a thread could not be started: {error}");
    if error.raw_os_error() != Some(libc::EAGAIN) {
        return said;
    }
    if let Err(no_memory) = room_for_stack() {
        return format!(
            "{said}, because there is no room for its stack: {}",
            explained_memory(STACK_BYTES, &no_memory)
        );
    }
    let limit = limit(libc::RLIMIT_NPROC as i32).map_or(String::new(), |limit| format!(", now {limit}"));
    format!(
        "{said}; this user or this container has as many processes and threads as it may (raise `ulimit -u`{limit}, or the container's pids.max)"
    )
}

/// The size of a thread's stack in bytes: the default of Rust's standard library, and some room for
/// the guard page and the data that the C library adds.
const STACK_BYTES: usize = (2 << 20) + (64 << 10);

/// Fails if the kernel refuses memory for a thread's stack. The C library returns EAGAIN both for a
/// lack of memory and for too many threads. So this function maps a stack to find out which of the
/// two it was.
fn room_for_stack() -> io::Result<()> {
    let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let stack = unsafe { libc::mmap(std::ptr::null_mut(), STACK_BYTES, read_write, private, -1, 0) };
    if stack == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping just made, which nobody has used.
    unsafe { libc::munmap(stack, STACK_BYTES) };
    Ok(())
}

/// Returns the soft limit of a resource, or `None` where there is no limit.
fn limit(resource: i32) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is valid to write to. When the call fails, it keeps its initial value.
    unsafe { libc::getrlimit(resource as _, &raw mut limit) };
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Returns how many files this process may have open, or `None` where there is no limit.
pub(crate) fn files() -> Option<u64> {
    limit(libc::RLIMIT_NOFILE as i32)
}

/// Returns a text that says why the ranks of this machine cannot find each other through `/proc`,
/// and what to do. Returns `None` where they can.
pub fn broken_proc() -> Option<String> {
    let me = std::process::id();
    let need = "the ranks on host memory find each other through /proc";
    match std::fs::read_link("/proc/self") {
        Ok(link) if link.as_os_str() == me.to_string().as_str() => None,
        Ok(link) => Some(format!(
            "/proc belongs to another process-id namespace (there this process is {}, here it is {me}), and {need}: mount the /proc of this namespace (mount -t proc proc /proc)",
            link.display()
        )),
        Err(error) => {
            Some(format!("/proc is not mounted or not usable here ({error}), and {need}: mount -t proc proc /proc"))
        }
    }
}

/// Returns a text that says why this process may not open a file that process `owner` has open, and
/// what to do.
pub(crate) fn denied(owner: u32, error: &io::Error) -> String {
    let me = std::process::id();
    // SAFETY: the call has no arguments.
    let mine = unsafe { libc::geteuid() };
    match user_of(owner) {
        Some(theirs) if theirs != mine => format!(
            "process {owner} runs as user {theirs} and this one (pid {me}) as user {mine}, which may not open the shared memory of process {owner} ({error}): run all ranks of a job as one user"
        ),
        _ => format!(
            "process {owner} does not let this one (pid {me}, user {mine}) open its shared memory ({error}): the ranks of a job must be dumpable (prctl PR_SET_DUMPABLE, set-user-id programs, file capabilities) and have the same capabilities, and a security module (SELinux, AppArmor) must let them trace each other"
        ),
    }
}

/// Returns the effective user of a process. It stands in the line `Uid:` of `/proc/<pid>/status`,
/// which every user may read.
fn user_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    users.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_named_with_what_to_raise() {
        let said = explained(&io::Error::from_raw_os_error(libc::EMFILE));
        assert!(said.contains("ulimit -n"), "{said}");
        assert!(no_thread(&io::Error::from_raw_os_error(libc::EAGAIN)).contains("pids.max"));
        let memory = explained_memory(usize::MAX, &io::Error::from_raw_os_error(libc::ENOMEM));
        assert!(memory.contains("Cannot allocate memory") && memory.contains("ran out"), "{memory}");
        assert!(explained_call("memfd_create", &io::Error::from_raw_os_error(libc::EPERM)).contains("seccomp"));
        let plain = io::Error::from_raw_os_error(libc::EINVAL);
        assert_eq!(explained(&plain), plain.to_string());
    }

    #[test]
    fn this_process_has_a_proc_of_its_own_and_a_user() {
        assert_eq!(broken_proc(), None);
        // SAFETY: the call has no arguments.
        assert_eq!(user_of(std::process::id()), Some(unsafe { libc::geteuid() }));
    }
}
