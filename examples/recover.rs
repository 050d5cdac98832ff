//! A job that heals, in Rust: any rank may be killed at any time, and comes back as a new process.
//!
//! ```sh
//! cargo build --bin devicemesh --example recover
//! target/debug/devicemesh run -n 3 --restart rank --max-restarts 5 -- target/debug/examples/recover
//! ```
//!
//! The ranks fit a line to data, and each takes its share of every batch. A rank that is killed is
//! started again, and gets the weights from another rank. The others wait for it, so the result is
//! that of a job that nobody disturbs.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use devicemesh::comm::{Operator, RecoverOptions, View, World, WorldOptions};
use devicemesh::error::{Error, Result, Status};

const SAMPLES: usize = 64;
const RATE: f64 = 0.5;
/// How long the ranks wait for a process in the place of a lost one.
const REPLACE: Duration = Duration::from_secs(60);

/// The weights after the last step, and those before it, because the other ranks may be one step
/// apart when a rank is lost.
#[derive(Default)]
struct Training {
    step: i64,
    weights: [f64; 2],
    before: [f64; 2],
}

impl Training {
    /// Trains until the end, or until a process waits to join. Returns whether the training is
    /// done.
    fn train(&mut self, mesh: &View, world: &World, steps: i64) -> Result<bool> {
        while self.step < steps {
            self.advance(mesh)?;
            if self.step % 50 == 0 {
                println!("rank {} is at step {}", world.rank(), self.step);
                let mut waiting = [world.num_waiting()?];
                mesh.all_reduce("dp", &mut waiting, Operator::Sum)?;
                if waiting[0] > 0 && self.step < steps {
                    return Ok(false);
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(true)
    }

    /// Makes one step on this rank's share of the samples of y = 3x - 1.
    fn advance(&mut self, mesh: &View) -> Result<()> {
        let (rank, size) = (mesh.mesh().local_rank(0)?, mesh.mesh().dim_size(0));
        let mut sums = [0.0, 0.0];
        for sample in (rank..SAMPLES).step_by(size) {
            let x = 2.0 * sample as f64 / (SAMPLES - 1) as f64 - 1.0;
            let off = self.weights[0] * x + self.weights[1] - (3.0 * x - 1.0);
            sums[0] += off * x / SAMPLES as f64;
            sums[1] += off / SAMPLES as f64;
        }
        mesh.all_reduce("dp", &mut sums, Operator::Sum)?;
        self.before = self.weights;
        self.weights = [self.weights[0] - RATE * sums[0], self.weights[1] - RATE * sums[1]];
        self.step += 1;
        Ok(())
    }

    /// Brings the ranks to one state after a recovery. They go back to the last step that all have
    /// done, and the ranks that have joined get the weights.
    fn share(&mut self, mesh: &View, has_state: bool) -> Result<()> {
        let mut first = [if has_state { self.step } else { i64::MAX }];
        mesh.all_reduce("dp", &mut first, Operator::Min)?;
        if has_state && self.step > first[0] {
            self.weights = self.before;
        }
        self.step = first[0];
        let recovered = mesh.root_comms().recovered();
        match recovered.state_root {
            Some(root) if !recovered.joined_ranks.is_empty() => mesh.broadcast("dp", &mut self.weights, root),
            _ => Ok(()),
        }
    }
}

fn main() -> Result<()> {
    let steps = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(400);
    // `devicemesh run` sets the variable for a process that comes back.
    let comes_back = std::env::var("DM_JOIN").is_ok_and(|join| join == "running");
    let world = match World::join("cpu", &WorldOptions::default()) {
        Err(error) if error.status() == Status::InvalidState && comes_back => return too_late(&error),
        joined => Arc::new(joined?),
    };
    println!("rank {} is process {}", world.rank(), std::process::id());
    let mut mesh = match View::init(&world, &[world.size()], &["dp"]) {
        Err(error) if error.status() == Status::InvalidState && world.ticket() > 0 => return too_late(&error),
        made => made?,
    };
    let (mut state, mut has_state) = (Training::default(), !mesh.root_comms().recovered().has_joined);
    loop {
        let lets_in = match go_on(&mesh, &world, &mut state, &mut has_state, steps) {
            Ok(true) => break,
            Ok(false) => true,
            Err(error) => {
                println!("rank {} notices: {error}", world.rank());
                false
            }
        };
        let options = RecoverOptions::default().replace(REPLACE).has_state(has_state);
        mesh = match mesh.recover(&options) {
            // The others had agreed on the end of the job before a rank was lost.
            Err(error) if error.status() == Status::Aborted => break,
            // The process that waited to join is lost by now.
            Err(error) if error.status() == Status::InvalidState && lets_in => continue,
            next => next?,
        };
        let recovered = mesh.root_comms().recovered();
        has_state &= !recovered.has_joined;
        println!("rank {} is in epoch {} with {} ranks", world.rank(), recovered.epoch, mesh.mesh().size());
    }
    let [slope, offset] = state.weights;
    println!("rank {} is done: y = {slope:.3} x {offset:+.3} after step {}", world.rank(), state.step);
    Ok(())
}

/// Trains in the mesh of one epoch. Returns whether the job has ended; otherwise a process waits to
/// join.
fn go_on(mesh: &View, world: &World, state: &mut Training, has_state: &mut bool, steps: i64) -> Result<bool> {
    if mesh.root_comms().recovered().epoch > 0 {
        state.share(mesh, *has_state)?;
        *has_state = true;
    }
    if !state.train(mesh, world, steps)? {
        return Ok(false);
    }
    world.finalize(None)?;
    Ok(true)
}

/// The job that this process was to join has ended. The exit code of this process is 0, because
/// the launcher would take any other code for a failed rank.
fn too_late(error: &Error) -> Result<()> {
    println!("comes too late: {error}");
    Ok(())
}
