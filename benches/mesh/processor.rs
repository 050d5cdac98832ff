//! The time that a thread has a processor, instead of the time on the clock: on a machine that
//! others use too, the clock counts their work. What is measured here never waits, so on an idle
//! machine the two are the same.

use std::time::Duration;

use criterion::measurement::{Measurement, ValueFormatter, WallTime};

pub struct ProcessorTime;

/// The processor time that the calling thread has used so far.
pub fn processor_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid structure to fill.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

impl Measurement for ProcessorTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        processor_time()
    }

    fn end(&self, start: Duration) -> Duration {
        processor_time() - start
    }

    fn add(&self, one: &Duration, other: &Duration) -> Duration {
        *one + *other
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        value.as_nanos() as f64
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        WallTime.formatter()
    }
}
