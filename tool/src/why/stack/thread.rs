//! Stops one thread for a moment, and reads its registers.

use std::thread::sleep;
use std::time::{Duration, Instant};

use framehop::UnwindRegsNative;
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// How long the tool waits until a thread stops. A thread that waits in a driver does not.
const PATIENCE: Duration = Duration::from_millis(50);

/// Runs `look` with the program counter and the registers of a thread, which does not run
/// meanwhile. Afterwards the thread goes on in the system call in which it was.
///
/// The thread is attached by PTRACE_SEIZE, which sends no signal. A thread that a signal has
/// stopped stays stopped.
pub fn stopped<T>(thread: u32, look: impl FnOnce(u64, UnwindRegsNative) -> T) -> Result<T, Errno> {
    let thread = Pid::from_raw(thread as i32);
    ptrace::seize(thread, Options::empty())?;
    ptrace::interrupt(thread)?;
    let until = Instant::now() + PATIENCE;
    // When the thread that runs this ends, the kernel detaches what it has attached.
    loop {
        match waitpid(thread, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG))? {
            WaitStatus::StillAlive if Instant::now() < until => sleep(Duration::from_micros(200)),
            WaitStatus::StillAlive => return Err(Errno::ETIMEDOUT),
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => return Err(Errno::ESRCH),
            // The thread was about to get this signal. It gets the signal now.
            WaitStatus::Stopped(_, signal) => {
                let seen = registers(thread).map(|(counter, registers)| look(counter, registers));
                ptrace::detach(thread, signal)?;
                return seen;
            }
            _ => break,
        }
    }
    let seen = registers(thread).map(|(counter, registers)| look(counter, registers));
    ptrace::detach(thread, None)?;
    seen
}

#[cfg(target_arch = "x86_64")]
fn registers(thread: Pid) -> Result<(u64, UnwindRegsNative), Errno> {
    let registers = ptrace::getregs(thread)?;
    Ok((registers.rip, UnwindRegsNative::new(registers.rip, registers.rsp, registers.rbp)))
}

#[cfg(target_arch = "aarch64")]
fn registers(thread: Pid) -> Result<(u64, UnwindRegsNative), Errno> {
    let registers = ptrace::getregset::<ptrace::regset::NT_PRSTATUS>(thread)?;
    Ok((registers.pc, UnwindRegsNative::new(registers.regs[30], registers.sp, registers.regs[29])))
}
