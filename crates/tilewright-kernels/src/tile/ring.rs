//! Producer-consumer pipeline of shared-memory stages.
//!
//! Each stage has two mbarriers: `full` completes when the bytes of the stage have arrived, `empty` when all
//! consumers have released it. A phase is one turn around the ring. Both sides count turns and wait for the parity of
//! their turn. In its first turn a producer waits for the parity of the previous turn, which a fresh mbarrier reports
//! as complete.

use std::panic::Location;
use tilewright_ptx::{Barrier, Builder, IntoOperand, Value, Var};

/// The mbarriers of a ring of stages.
#[derive(Debug, Clone, Copy)]
pub struct Ring<'k> {
    full: Barrier<'k>,
    empty: Barrier<'k>,
    stages: usize,
}

impl<'k> Ring<'k> {
    /// A ring of `stages` stages; `name` prefixes its barriers.
    #[track_caller]
    pub fn new(k: &'k Builder, name: &str, stages: usize) -> Self {
        let full = k.barriers(&format!("{name}_full"), stages);
        let empty = k.barriers(&format!("{name}_empty"), stages);
        Self { full, empty, stages }
    }

    /// Initializes the barriers, by one thread: `producers` arrivals fill a stage, `consumers` empty it.
    #[track_caller]
    pub fn init(self, k: &'k Builder, producers: impl IntoOperand<u32>, consumers: u32) {
        for stage in 0..self.stages as u32 {
            self.full.at(k.constant(stage)).init(producers);
            self.empty.at(k.constant(stage)).init(consumers);
        }
    }

    /// The barrier that completes when a stage is full.
    #[track_caller]
    pub fn full_at(self, stage: Value<'k, u32>) -> Barrier<'k> {
        self.full.at(stage)
    }

    /// Cursor at the first stage.
    #[track_caller]
    pub fn cursor(self, k: &'k Builder) -> Cursor<'k> {
        Cursor { k, ring: self, stage: k.var("stage", 0), turn: k.var("turn", 0) }
    }
}

/// One thread of the warp arrives, after all its lanes.
#[track_caller]
pub(crate) fn release_from_warp<'k>(k: &'k Builder, empty: Barrier<'k>) {
    let _line = k.at_line(Location::caller());
    k.sync_warp();
    k.when(k.lane().eq(0), || empty.arrive());
}

/// Position of one side of a ring.
#[derive(Debug, Clone, Copy)]
pub struct Cursor<'k> {
    k: &'k Builder,
    ring: Ring<'k>,
    stage: Var<'k, u32>,
    /// Parity of the turn.
    turn: Var<'k, u32>,
}

impl<'k> Cursor<'k> {
    /// Stage index.
    #[track_caller]
    pub fn stage(self) -> Value<'k, u32> {
        self.stage.get()
    }

    /// Producer: waits until the stage is empty and expects `bytes`; returns the barrier for the copies.
    #[track_caller]
    pub fn fill(self, bytes: u32) -> Barrier<'k> {
        let _line = self.k.at_line(Location::caller());
        self.wait_empty();
        let full = self.full();
        full.arrive_expecting(bytes);
        full
    }

    /// Producer: waits until the stage is empty.
    #[track_caller]
    pub fn wait_empty(self) {
        let _line = self.k.at_line(Location::caller());
        self.ring.empty.at(self.stage.get()).wait(self.turn.get() ^ 1);
    }

    /// Producer: the barrier that completes when the stage is full.
    #[track_caller]
    pub fn full(self) -> Barrier<'k> {
        let _line = self.k.at_line(Location::caller());
        self.ring.full.at(self.stage.get())
    }

    /// Consumer: waits until the stage is full.
    #[track_caller]
    pub fn wait_full(self) {
        let _line = self.k.at_line(Location::caller());
        self.ring.full.at(self.stage.get()).wait(self.turn.get());
    }

    /// Consumer: the barrier that completes when the stage is empty.
    #[track_caller]
    pub(crate) fn empty(self) -> Barrier<'k> {
        let _line = self.k.at_line(Location::caller());
        self.ring.empty.at(self.stage.get())
    }

    /// Consumer: releases the stage with one arrival.
    #[track_caller]
    pub fn release(self) {
        let _line = self.k.at_line(Location::caller());
        self.empty().arrive();
    }

    /// Moves to the next stage.
    #[track_caller]
    pub fn advance(self) {
        let _line = self.k.at_line(Location::caller());
        let next = self.stage.get() + 1;
        let around = next.eq(self.ring.stages as u32);
        self.turn.set(around.select::<u32>(self.turn.get() ^ 1, self.turn.get()));
        self.stage.set(around.select::<u32>(0, next));
    }
}
