//! Loads of the units of a ring by TMA: boxes of 16 keys or of one, all elements of a head at once.
//!
//! The addresses and instructions of `cp.async` take a third of the time of a stage. Without them an SM draws up to half as much again,
//! so decode steps beside a prompt need fewer SMs.
//!
//! A unit has an mbarrier, which completes a phase per turn around the ring. A warp fills and reads its own units alone, so it needs no
//! barrier for units that are free: its lanes have read a unit before the next box is loaded into it.
//!
//! One lane loads all boxes, with the coordinates of the others. TMA takes its operands from uniform registers: for boxes of many lanes,
//! the assembler emits a loop over lanes, each of which waits for its moves to these registers.

use crate::attention::{
    body::mma::layout::SplitKvLayout,
    kernel::{BoxCorner, MmaCta, RowFormat, WARPS},
};
use tilewright_ptx::{Barrier, Builder, CachePolicy, Fence, Shared, TensorBox, Value, Var};

/// Boxes of one key that are loaded one after the other: of 1 to 32, the fastest on an H200.
const ROWS_AT_ONCE: u32 = 2;

/// A tensor of the cache.
#[derive(Debug, Clone, Copy)]
struct BoxTensor<'k> {
    map: Value<'k, u64>,
    format: RowFormat,
}

/// Tensor maps, and the barriers of this warp's units.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StageBoxes<'k> {
    k: &'k Builder,
    /// Keys, then values.
    tensors: [BoxTensor<'k>; 2],
    /// This warp's ring, and the barriers of its units.
    ring: Shared<'k, u32>,
    barriers: Barrier<'k>,
    unit_bytes: u32,
    /// Boxes per unit.
    boxes: u32,
    /// Parity of the turn around the ring in which units are read.
    turn: Var<'k, u32>,
}

impl<'k> StageBoxes<'k> {
    /// Initializes the barriers; valid after a barrier of the CTA.
    pub(crate) fn new(cta: &MmaCta<'k>, layout: &SplitKvLayout, maps: [Value<'k, u64>; 2]) -> Self {
        let (k, count) = (cta.k, WARPS * layout.num_units);
        let barriers = k.barriers("units", count);
        k.when(k.thread().lt(count as u32), || {
            barriers.at(k.thread()).init(1);
            k.fence(Fence::MbarrierInit);
        });
        k.when(k.thread().eq(0), || maps.iter().for_each(|map| k.prefetch_tensor_map(*map)));
        let [key, value] = maps;
        let tensor = |map, format| BoxTensor { map, format };
        Self {
            k,
            tensors: [tensor(key, cta.layout.stored_k), tensor(value, cta.layout.stored_v)],
            ring: cta.at::<u32>(layout.rings).byte(k.warp_index() * layout.ring_bytes as u32),
            barriers: barriers.at(k.warp_index() * layout.num_units as u32),
            unit_bytes: layout.unit_bytes as u32,
            boxes: cta.layout.stored_k.boxes(layout.stage_keys) as u32,
            turn: k.var("turn", 0),
        }
    }

    /// The barrier of the unit at byte `unit` of the ring.
    fn barrier(&self, unit: Value<'k, u32>) -> Barrier<'k> {
        self.barriers.at(unit / self.unit_bytes)
    }

    /// Loads the keys (table 0) or values (table 1) of a stage into unit `unit` of the ring. Each lane has the corner of a box. Boxes of
    /// pages that do not exist are zero-filled.
    pub(super) fn load(
        &self,
        table: usize,
        corner: BoxCorner<'k>,
        unit: Value<'k, u32>,
        policy: CachePolicy<'k>,
    ) {
        let (k, BoxTensor { map, format }) = (self.k, self.tensors[table]);
        let (lane, barrier, box_bytes) = (k.lane(), self.barrier(unit), format.box_bytes());
        k.when(lane.eq(0), || barrier.arrive_expecting(self.boxes * box_bytes as u32));
        let (zero, unit) = (k.constant(0), self.ring.byte(unit));
        let at_once = if format.box_rows == Some(1) { ROWS_AT_ONCE } else { 1 };
        for first in (0..self.boxes).step_by(at_once as usize) {
            let corners: Vec<_> = (first..first + at_once).map(|at| corner.of_lane(at)).collect();
            k.when(lane.eq(0), || {
                for (at, corner) in (first as usize..).zip(&corners) {
                    let corner = &[&[zero], &corner[..], &[zero]].concat();
                    let from = TensorBox { policy: Some(policy), ..TensorBox::new(map, corner) };
                    k.load_tensor(unit.plus(at * box_bytes / 4), from, barrier);
                }
            });
        }
    }

    /// Waits until the unit at byte `unit` of the ring has been loaded.
    pub(super) fn wait(&self, unit: Value<'k, u32>) {
        self.barrier(unit).wait(self.turn.get());
    }

    /// Begins the next turn if the next unit that is read is the first one.
    pub(super) fn advance(&self, next: Value<'k, u32>) {
        let turn = self.turn.get();
        self.turn.set(turn.unless(next.eq(0), turn ^ 1));
    }
}
