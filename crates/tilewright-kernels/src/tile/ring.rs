//! Stages of shared memory that a producer fills and consumers empty, in turn.
//!
//! Each stage has two barriers. `full` is over when the bytes of the stage have arrived, `empty` when all consumers are done with
//! it. A phase is one turn around the ring: both sides count turns, and wait for the phase of their turn's parity. In its first
//! turn a producer finds all stages empty: it waits for the parity of the turn before, which a fresh barrier takes to be over.

use std::panic::Location;
use tilewright_ptx::build::{Barrier, Builder, Value, Var};

/// The barriers of a ring of stages.
#[derive(Debug, Clone, Copy)]
pub struct Ring<'k> {
    full: Barrier<'k>,
    empty: Barrier<'k>,
    stages: usize,
}

impl<'k> Ring<'k> {
    /// A ring of `stages` stages; its barriers are called after `name`.
    #[track_caller]
    pub fn new(k: &'k Builder, name: &str, stages: usize) -> Self {
        let full = k.barriers(&format!("{name}_full"), stages);
        let empty = k.barriers(&format!("{name}_empty"), stages);
        Self { full, empty, stages }
    }

    /// Begins its life, by one thread: `consumers` arrivals empty a stage.
    #[track_caller]
    pub fn init(self, k: &'k Builder, consumers: u32) {
        for stage in 0..self.stages as u32 {
            self.full.at(k.constant(stage)).init(1);
            self.empty.at(k.constant(stage)).init(consumers);
        }
    }

    /// The place where one side begins.
    #[track_caller]
    pub fn cursor(self, k: &'k Builder) -> Cursor<'k> {
        Cursor { k, ring: self, stage: k.var("stage", 0), turn: k.var("turn", 0) }
    }
}

/// Where one side of a ring is.
#[derive(Debug, Clone, Copy)]
pub struct Cursor<'k> {
    k: &'k Builder,
    ring: Ring<'k>,
    stage: Var<'k, u32>,
    /// The parity of the turn.
    turn: Var<'k, u32>,
}

impl<'k> Cursor<'k> {
    /// The stage, which has a place in shared memory.
    #[track_caller]
    pub fn stage(self) -> Value<'k, u32> {
        self.stage.get()
    }

    /// The parity of the turn: what a consumer waits for, and a producer for the other.
    #[track_caller]
    pub fn turn(self) -> Value<'k, u32> {
        self.turn.get()
    }

    /// The producer waits until consumers are done with the stage, then announces `bytes`; gives the barrier to which copies
    /// report them.
    #[track_caller]
    pub fn fill(self, bytes: u32) -> Barrier<'k> {
        let _line = self.k.at_line(Location::caller());
        self.ring.empty.at(self.stage.get()).wait(self.turn.get() ^ 1);
        let full = self.ring.full.at(self.stage.get());
        full.arrive_expecting(bytes);
        full
    }

    /// A consumer waits until the stage is full.
    #[track_caller]
    pub fn wait_full(self) {
        let _line = self.k.at_line(Location::caller());
        self.ring.full.at(self.stage.get()).wait(self.turn.get());
    }

    /// A consumer is done with the stage: one arrival.
    #[track_caller]
    pub fn release(self) {
        let _line = self.k.at_line(Location::caller());
        self.ring.empty.at(self.stage.get()).arrive();
    }

    /// On to the next stage.
    #[track_caller]
    pub fn advance(self) {
        let _line = self.k.at_line(Location::caller());
        let next = self.stage.get() + 1;
        let around = next.eq(self.ring.stages as u32);
        self.turn.set(around.select::<u32>(self.turn.get() ^ 1, self.turn.get()));
        self.stage.set(around.select::<u32>(0, next));
    }

    /// A second cursor at the same place.
    #[must_use]
    #[track_caller]
    pub fn fork(self, k: &'k Builder) -> Self {
        let (stage, turn) = (k.var("stage", self.stage.get()), k.var("turn", self.turn.get()));
        Self { stage, turn, ..self }
    }

    /// Goes where another cursor of the same ring is.
    #[track_caller]
    pub fn follow(self, other: Self) {
        self.stage.set(other.stage.get());
        self.turn.set(other.turn.get());
    }
}
