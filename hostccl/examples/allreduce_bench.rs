//! Measures all-reduce between processes of this machine.
//!
//! `cargo run --release -p hostccl --example allreduce_bench [ranks ...]` starts that many
//! processes of itself for each argument (2, 4 and 8 when there is none). The argument `2x3` stands
//! for two hosts of three ranks each, which exchange data over the wire. For several sizes it
//! prints the median time over the repetitions, where the time of a repetition is that of the
//! slowest rank. The bus bandwidth is that of nccl-tests: bytes / time * 2 (n - 1) / n.

use std::env;
use std::ffi::{CStr, c_int};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::time::Instant;

use hostccl::types::*;
use hostccl::*;

const BYTES: [usize; 8] = [4, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20];

fn check(result: ncclResult_t) {
    if result != ncclSuccess {
        // SAFETY: NULL is allowed, and the string lives until this thread's next failing call.
        let message = unsafe { CStr::from_ptr(ncclGetLastError(null_mut())) };
        eprintln!("{}", message.to_string_lossy());
        std::process::exit(1);
    }
}

fn main() {
    if let Ok(rank) = env::var("ALLREDUCE_BENCH_RANK") {
        let size = env::var("ALLREDUCE_BENCH_SIZE").ok().and_then(|size| size.parse().ok()).unwrap_or(1);
        return run_rank(rank.parse().unwrap_or(0), size);
    }
    let shape = |arg: String| match arg.split_once('x') {
        Some((hosts, ranks)) => Some((hosts.parse().ok()?, ranks.parse().ok()?)),
        None => Some((1, arg.parse().ok()?)),
    };
    let mut shapes: Vec<(c_int, c_int)> = env::args().skip(1).filter_map(shape).collect();
    if shapes.is_empty() {
        shapes = vec![(1, 2), (1, 4), (1, 8)];
    }
    println!("{}", machine());
    for (hosts, ranks) in shapes {
        launch(hosts, ranks);
    }
}

/// Returns the processor's name and the number of processors.
fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map_or("?", |pair| pair.1);
    format!("{model}, {} processors", std::thread::available_parallelism().map_or(1, usize::from))
}

fn launch(hosts: c_int, ranks: c_int) {
    let size = hosts * ranks;
    let program = env::current_exe().expect("this program has a path");
    let mut children: Vec<_> = (0..size)
        .map(|rank| {
            Command::new(&program)
                .env("ALLREDUCE_BENCH_RANK", rank.to_string())
                .env("ALLREDUCE_BENCH_SIZE", size.to_string())
                .env("DM_HOSTCCL_HOST", if hosts > 1 { format!("host{}", rank / ranks) } else { String::new() })
                .stdin(Stdio::piped())
                .stdout(if rank == 0 { Stdio::piped() } else { Stdio::inherit() })
                .spawn()
                .expect("a child starts")
        })
        .collect();
    // Rank 0 makes the id and writes it in its first line. The other ranks read it from their
    // standard input.
    let mut output = BufReader::new(children[0].stdout.take().expect("rank 0 has a pipe"));
    let mut id = String::new();
    output.read_line(&mut id).expect("rank 0 says the id");
    for child in &mut children[1..] {
        child.stdin.take().expect("a pipe").write_all(id.as_bytes()).expect("a child reads the id");
    }
    let mut report = String::new();
    output.read_to_string(&mut report).expect("rank 0 reports");
    print!("{report}");
    for mut child in children {
        assert!(child.wait().expect("a child ends").success(), "a rank failed");
    }
}

fn exchange_id(rank: c_int) -> ncclUniqueId {
    let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
    if rank == 0 {
        // SAFETY: there is a place for the id.
        check(unsafe { ncclGetUniqueId(&raw mut id) });
        let hex: String = id.internal.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
        println!("{hex}");
    } else {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).expect("the id comes");
        for (byte, at) in id.internal.iter_mut().zip((0..).step_by(2)) {
            *byte = u8::from_str_radix(&line[at..at + 2], 16).expect("hexadecimal digits") as _;
        }
    }
    id
}

fn run_rank(rank: c_int, size: c_int) {
    let mut comm = null_mut();
    let id = exchange_id(rank);
    let started = Instant::now();
    // SAFETY: a place for the communicator. The buffers below hold what the calls say.
    check(unsafe { ncclCommInitRank(&raw mut comm, size, id, rank) });
    if rank == 0 {
        println!("{size} ranks, init {:.2} ms", started.elapsed().as_secs_f64() * 1e3);
    }
    for bytes in BYTES {
        let count = bytes / 4;
        let send = vec![1.0_f32; count];
        let mut recv = vec![0.0_f32; count];
        let repetitions = (256 << 20) / bytes.max(128 << 10);
        let mut times: Vec<f64> = Vec::with_capacity(repetitions);
        for round in 0..repetitions + repetitions.min(20) {
            let started = Instant::now();
            // SAFETY: as above.
            check(unsafe {
                ncclAllReduce(
                    send.as_ptr().cast(),
                    recv.as_mut_ptr().cast(),
                    count,
                    DataType::Float32 as c_int,
                    ReduceOp::Sum as c_int,
                    comm,
                    null_mut(),
                )
            });
            if round >= repetitions.min(20) {
                times.push(started.elapsed().as_secs_f64());
            }
        }
        assert!(recv.iter().all(|&sum| sum == size as f32), "a wrong sum");
        // The maximum over the ranks is the time of the slowest one.
        // SAFETY: as above. The call is in place.
        check(unsafe {
            ncclAllReduce(
                times.as_ptr().cast(),
                times.as_mut_ptr().cast(),
                times.len(),
                DataType::Float64 as c_int,
                ReduceOp::Max as c_int,
                comm,
                null_mut(),
            )
        });
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        let bus = bytes as f64 / median * 2.0 * f64::from(size - 1) / f64::from(size) / 1e9;
        if rank == 0 {
            println!("  {bytes:>9} bytes  {:>10.1} us  busbw {bus:>6.2} GB/s", median * 1e6);
        }
    }
    // SAFETY: the communicator is live.
    check(unsafe { ncclCommDestroy(comm) });
}
