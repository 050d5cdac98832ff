//! One `devicemesh why` on each host, started by srun or mpirun. They meet as the ranks of a job
//! do, in a store that the first one serves. The first one asks the others, and says what is wrong.

use std::time::Duration;

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
        let get = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        // Where variables contradict each other, this process is alone.
        let place = detect(&get).ok().filter(|place| place.size > 1 && LAUNCHERS.contains(&place.launcher));
        let Some(place) = place else { return Ok(None) };
        let Some(address) = place.address.clone() else {
            let Place { launcher, size, advice, .. } = place;
            return Err(Failure::new(
                NOT_MADE,
                format!("{launcher} has started {size} of these, and nothing says where they meet: {advice}"),
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
            let advice = "; the processes need a MASTER_PORT that is not the job's";
            Failure::new(NOT_MADE, format!("{}{advice}", self.place.taken(error).message()))
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
