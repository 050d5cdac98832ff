//! One `devicemesh why` on each host, started by srun or mpirun. They meet as the ranks of a job
//! do, in a store that the first one serves. The first one asks the others, and says what is wrong.

use std::time::Duration;

use devicemesh::printable::printable;
use devicemesh::rendezvous::launcher::{Place, detect};
use devicemesh::rendezvous::store::{Secret, Server, TcpStore};
use devicemesh::wait::Wait;

use super::answer::answer;
use super::exit_code::NOT_MADE;
use super::lines::Line;
use crate::failure::Failure;
use crate::run::{Board, Peer, next_question};

/// The launchers that may start one `devicemesh why` on each host. The variables of the others are
/// also in shells that people open beside a job.
const LAUNCHERS: [&str; 5] = ["Slurm", "Open MPI", "PALS", "PMI", "PMIx"];
/// How long the processes may take to meet where the user gives no time.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longer than anybody watches a job.
const FOREVER: Duration = Duration::from_secs(365 * 86_400);

/// The part of this process among those that were started together.
pub struct Launched {
    place: Place,
    secret: Option<Secret>,
    address: (String, u16),
    /// How long the processes may take to meet, and to answer.
    pub patience: Duration,
}

impl Launched {
    /// The part of this process. `None` where it was started alone.
    pub fn here(patience: Option<Duration>) -> Result<Option<Launched>, Failure> {
        // Where variables contradict each other, this process is alone.
        let place = detect(&variable).ok().filter(|place| place.size > 1 && LAUNCHERS.contains(&place.launcher));
        let Some(place) = place else { return Ok(None) };
        let Some(address) = place.address.clone() else {
            let Place { launcher, size, .. } = place;
            return Err(Failure::new(
                NOT_MADE,
                format!("{launcher} has started {size} of these, and nothing says where they meet: {}", advice(&place)),
            ));
        };
        let secret = Secret::from_environment().map_err(|error| Failure::new(NOT_MADE, error.message()))?;
        Ok(Some(Launched { place, secret, address, patience: patience.unwrap_or(PATIENCE) }))
    }

    /// Whether this process says what is wrong.
    pub fn is_first(&self) -> bool {
        self.place.rank == 0
    }

    /// Serves the store, for the first process.
    pub fn serve(&self) -> Result<(Server, Line), Failure> {
        let (host, port) = &self.address;
        let failed = |error: devicemesh::error::Error| {
            let advice = match self.place.job {
                0 => "the processes need a MASTER_PORT that is free and not the job's".to_owned(),
                _ => {
                    let launcher = self.place.launcher;
                    format!("the address was made from the variables of {launcher}: {}", advice(&self.place))
                }
            };
            Failure::new(NOT_MADE, format!("{}; {advice}", error.message()))
        };
        let server = Server::at(host, *port, self.secret.clone()).map_err(failed)?;
        let peer = |rank: usize| Peer {
            arrival: rank as u32 + 1,
            name: format!("process {rank} of {}", self.place.launcher),
            ranks: Vec::new(),
            lost: None,
        };
        let peers = (0..self.place.size).map(peer).collect();
        Ok((server, Line { board: self.connect()?, peers, own: vec![1], address: None }))
    }

    /// Answers the questions of the first process until it asks no more.
    pub fn answer(&self) -> Result<(), Failure> {
        let board = self.connect()?;
        let failed = |error: devicemesh::error::Error| Failure::new(NOT_MADE, error.message());
        let mut wait = Wait::after(self.patience);
        while let Some(question) = next_question(&board, self.place.rank as u32 + 1, &wait).map_err(failed)? {
            let text = answer(question.request.as_bytes(), &|_, _| true);
            let key = question.answer_key(self.place.rank as u32 + 1);
            board.set(&key, &text, &Wait::after(self.patience)).map_err(failed)?;
            wait = Wait::after(FOREVER);
        }
        Ok(())
    }

    fn connect(&self) -> Result<Board, Failure> {
        let (host, port) = &self.address;
        let store = TcpStore::connect_with_secret(host, *port, self.secret.clone(), &Wait::after(self.patience));
        let failed = |error: devicemesh::error::Error| {
            Failure::new(
                NOT_MADE,
                format!("the first of {} processes is out of reach: {}", self.place.size, error.message()),
            )
        };
        Ok(Board::new(store.map_err(failed)?, None))
    }
}

/// A variable of the environment that is not empty.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns the variables to set so that the processes meet. The advice for programs also names an
/// option that this tool does not have.
fn advice(place: &Place) -> &'static str {
    place.advice.split_once(", or ").map_or(place.advice, |(variables, _)| variables)
}

/// Returns the command that asks all hosts, where srun has started one process alone and ranks are
/// missing. Without -N, `srun --jobid` starts a process on one node of the job.
pub fn advice_for_one(get: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let place = detect(get).ok().filter(|place| place.launcher == "Slurm" && place.size == 1)?;
    let job = get("SLURM_JOB_ID")?;
    Some(format!(
        "{} has started this tool once, so it sees only the ranks of this host. To see all ranks, run \
         `srun --jobid={} --overlap -N NODES --ntasks-per-node=1 devicemesh why`, where NODES is the job's number of nodes",
        place.launcher,
        printable(&job)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_of_srun_is_told_how_to_ask_all_hosts() {
        let said = |tasks: &str| {
            let tasks = tasks.to_owned();
            advice_for_one(&move |name| match name {
                "SLURM_JOB_ID" => Some("7".to_owned()),
                "SLURM_STEP_ID" | "SLURM_PROCID" | "SLURM_LOCALID" => Some("0".to_owned()),
                "SLURM_STEP_NODELIST" => Some("node001".to_owned()),
                "SLURM_STEP_NUM_TASKS" | "SLURM_STEP_NUM_NODES" => Some(tasks.clone()),
                _ => None,
            })
        };
        assert!(said("1").unwrap().contains("`srun --jobid=7 --overlap -N NODES --ntasks-per-node=1 devicemesh why`"));
        assert_eq!(said("2"), None);
        assert_eq!(advice_for_one(&|_| None), None);
    }

    #[test]
    fn the_advice_is_what_a_user_of_the_tool_can_set() {
        let cases = [("OMPI_COMM_WORLD", "mpirun -x MASTER_ADDR=HOST"), ("PMI", "mpiexec -genv MASTER_ADDR HOST")];
        for (prefix, expected) in cases {
            let get = |name: &str| match name.strip_prefix(prefix)? {
                "_RANK" => Some("0".to_owned()),
                "_SIZE" => Some("2".to_owned()),
                _ => None,
            };
            let place = detect(&get).unwrap();
            assert!(place.address.is_none() && advice(&place).contains(expected), "{}", advice(&place));
            assert!(!advice(&place).contains("dm_world_options"), "{}", advice(&place));
        }
    }
}
