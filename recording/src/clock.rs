//! The ticks in which a recording has its times.
//!
//! The recorder reads the clock twice for each call: when the call begins, and when it ends.
//! `clock_gettime` takes longer than reading the processor's counter. So the ticks are the counter,
//! where all processors of the machine count alike and never stop. Elsewhere they are the
//! nanoseconds of the monotonic clock.
//!
//! The length of a tick is not known to the writer. A reader computes it from two [`Moment`]s.

/// Which clock gives the ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// `CLOCK_MONOTONIC`; a tick is a nanosecond.
    Monotonic = 0,
    /// The counter of the processor: the time-stamp counter (x86_64), or `CNTVCT_EL0` (aarch64).
    Counter = 1,
}

impl Clock {
    /// The best clock of this machine.
    pub fn of_this_machine() -> Clock {
        if counter::is_steady() { Clock::Counter } else { Clock::Monotonic }
    }

    /// The clock with that number in a recording.
    pub fn from_number(number: u64) -> Option<Clock> {
        [Clock::Monotonic, Clock::Counter].into_iter().find(|clock| *clock as u64 == number)
    }

    /// The ticks now. They are never 0.
    #[inline]
    pub fn ticks(self) -> u64 {
        let ticks = match self {
            Clock::Monotonic => nanoseconds(libc::CLOCK_MONOTONIC),
            Clock::Counter => counter::read(),
        };
        ticks.max(1)
    }

    /// The present moment on all clocks. Another thread may get the processor between two looks, so
    /// the best of some tries counts: the one whose looks lie closest together.
    pub fn moment(self) -> Moment {
        let tries = (0..4).map(|_| {
            let (before, monotonic, after) = (self.ticks(), nanoseconds(libc::CLOCK_MONOTONIC), self.ticks());
            (after.saturating_sub(before), before + after.saturating_sub(before) / 2, monotonic)
        });
        let (_, ticks, monotonic) = tries.min_by_key(|(took, ..)| *took).unwrap_or_default();
        Moment { ticks, monotonic, real: nanoseconds(libc::CLOCK_REALTIME) }
    }
}

/// One moment on three clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// The ticks of the recording's clock.
    pub ticks: u64,
    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub monotonic: u64,
    /// Nanoseconds since 1970.
    pub real: u64,
}

impl Moment {
    /// The nanoseconds of a tick, from this moment and a later one. `None` where the two are too
    /// close to each other for a useful number: less than 1 ms.
    pub fn nanoseconds_per_tick(&self, later: &Moment) -> Option<f64> {
        let (ticks, time) = (later.ticks.checked_sub(self.ticks)?, later.monotonic.checked_sub(self.monotonic)?);
        (time >= 1_000_000 && ticks > 0).then(|| time as f64 / ticks as f64)
    }
}

/// The nanoseconds of a clock of the kernel. The C library is asked, because it also finds the
/// clock under valgrind, which hides the kernel's page of functions (vDSO).
fn nanoseconds(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the place for the time is writable. The call fails only for a clock that is unknown.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(target_arch = "x86_64")]
mod counter {
    use std::arch::x86_64::{__cpuid, _rdtsc};

    /// The bit of "invariant TSC" in EDX of CPUID's leaf 0x8000_0007: the counter has one rate, and
    /// goes on while the processor sleeps (Intel SDM volume 3, 19.17.1; AMD APM volume 3, appendix
    /// E.4.6).
    const INVARIANT: u32 = 1 << 8;

    /// Whether the counter is steady, and the kernel found it equal on all processors: then the
    /// kernel takes its own time from the counter.
    pub fn is_steady() -> bool {
        let sources = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page"];
        let source = std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
        #[allow(unused_unsafe, reason = "__cpuid is unsafe before Rust 1.91")]
        // SAFETY: every x86_64 processor has CPUID.
        let power = unsafe {
            let largest = __cpuid(0x8000_0000).eax;
            if largest >= 0x8000_0007 { __cpuid(0x8000_0007).edx } else { 0 }
        };
        power & INVARIANT != 0 && source.is_ok_and(|source| sources.contains(&source.trim()))
    }

    #[inline]
    pub fn read() -> u64 {
        // SAFETY: every x86_64 processor has the counter, and Linux lets programs read it.
        unsafe { _rdtsc() }
    }
}

#[cfg(target_arch = "aarch64")]
mod counter {
    /// The architecture has one steady counter for all processors.
    pub fn is_steady() -> bool {
        true
    }

    #[inline]
    pub fn read() -> u64 {
        let ticks: u64;
        // SAFETY: Linux lets programs read the counter. The instruction touches no memory.
        unsafe { std::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack)) };
        ticks
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod counter {
    pub fn is_steady() -> bool {
        false
    }

    pub fn read() -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_tick_has_a_length() {
        for clock in [Clock::Monotonic, Clock::of_this_machine()] {
            let before = clock.moment();
            assert_eq!(before.nanoseconds_per_tick(&before), None);
            sleep(Duration::from_millis(20));
            let after = clock.moment();
            let length = before.nanoseconds_per_tick(&after).unwrap();
            let took = (after.ticks - before.ticks) as f64 * length;
            assert!(took >= 20e6, "{clock:?}: {took} ns");
        }
    }
}
