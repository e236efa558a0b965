//! A case in device memory: tensors, cache and schedule.

use super::{
    case::{Case, Scales, bytes, noise, number},
    schedule::{Cut, Schedule, Segment, request_rows},
};
use crate::judge::Outcome;
use std::ops::Range;
use tilewright::{HeadDim, attention::variant::ExpressionVariant};
use tilewright_kernels::{
    attention::{
        AttentionParams, Body, CacheTensor, KvLayout, PeTensors, RowTensor, ScaleTensor,
        body::{Bodies, mma::box_map, wgmma::kv_map},
        operator::AttentionKernel,
        params::{KernelKind, MlaWgmmaParams, OwnParams, RunParams},
    },
    variant::arguments,
};
use tilewright_ptx::{Arg, Fault, Kernel, Launch, Memory, TensorMap};

/// Inputs of the kernel and of the reference.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) case: Case,
    pub(crate) variant: ExpressionVariant,
    pub(crate) segments: Vec<Segment>,
    /// Entries of the page table.
    pub(crate) indices: Vec<u32>,
    pub(crate) q: Vec<u8>,
    pub(crate) k: Vec<u8>,
    pub(crate) v: Vec<u8>,
}

impl World {
    pub(crate) fn new(case: &Case, variant: &ExpressionVariant) -> Self {
        let mut world = Self {
            case: case.clone(),
            variant: variant.clone(),
            segments: Vec::new(),
            indices: Vec::new(),
            q: Vec::new(),
            k: Vec::new(),
            v: Vec::new(),
        };
        world.segment();
        world.fill();
        world
    }

    /// Creates segments and assigns pages.
    fn segment(&mut self) {
        let case = &self.case;
        let mut begin = 0;
        let shared = (case.prefix > 0).then(|| Segment {
            qo: 0..case.num_rows(),
            kv_heads: 0..case.heads.1,
            kv_start: 0,
            kv_len: case.prefix,
            base: 0,
            request: None,
            shared: true,
            mask: None,
        });
        let first_bytes = case.mask_bits().1;
        let own = case.lengths.iter().enumerate().map(|(r, &(rows, keys))| Segment {
            qo: case.first_row(r)..case.first_row(r) + rows,
            kv_heads: 0..case.heads.1,
            kv_start: 0,
            kv_len: keys - case.prefix,
            base: case.prefix,
            request: Some(r),
            shared: case.prefix > 0,
            mask: case.bits.map(|columns| (8 * first_bytes[r] as u64, columns.min(keys))),
        });
        self.segments = shared.into_iter().chain(own).collect();
        for segment in &mut self.segments {
            segment.kv_start = begin;
            begin += match case.layout {
                KvLayout::Ragged => segment.kv_len,
                _ => segment.kv_len.div_ceil(case.page_size),
            };
        }
        // shuffled pages with gaps; the blocks of a segment ascend with gaps
        self.indices = match case.layout {
            KvLayout::Ragged => Vec::new(),
            KvLayout::Paged => (0..begin).map(|i| ((i * 7 + 3) % self.num_pages()) as u32).collect(),
            KvLayout::Blocks => {
                let of = |segment: &Segment| {
                    (0..segment.kv_len.div_ceil(case.page_size)).map(|i| 2 * i as u32 + 1)
                };
                self.segments.iter().flat_map(of).collect()
            }
        };
    }

    fn entries(&self) -> usize {
        let last = self.segments.last().expect("a segment");
        match self.case.layout {
            KvLayout::Ragged => last.kv_start + last.kv_len,
            _ => last.kv_start + last.kv_len.div_ceil(self.case.page_size),
        }
    }

    /// Pages of the pool, not a multiple of 7; one for a ragged tensor.
    fn num_pages(&self) -> usize {
        match self.case.layout {
            KvLayout::Ragged => 1,
            KvLayout::Paged => (self.entries() + 1..).find(|pages| pages % 7 != 0).expect("there is one"),
            KvLayout::Blocks => 2 * self.entries() + 2,
        }
    }

    /// Elements of K or V.
    pub(crate) fn pool(&self, dim: usize) -> usize {
        self.num_pages() * self.strides(dim)[0]
    }

    fn slots(&self) -> usize {
        if self.case.layout == KvLayout::Ragged { self.entries() } else { self.case.page_size }
    }

    /// Page and slot of a segment's key.
    fn place(&self, segment: &Segment, key: usize) -> (usize, usize) {
        let size = self.case.page_size;
        match self.case.layout {
            KvLayout::Ragged => (0, segment.kv_start + key),
            _ => (self.indices[segment.kv_start + key / size] as usize, key % size),
        }
    }

    pub(crate) fn position(&self, segment: &Segment, key: usize) -> i64 {
        match self.case.layout {
            KvLayout::Blocks => {
                let (page, slot) = self.place(segment, key);
                (page * self.case.page_size + slot) as i64
            }
            _ => (segment.base + key) as i64,
        }
    }

    /// Strides of K or V in elements: pages, tokens, heads. Rows are padded.
    fn strides(&self, dim: usize) -> [usize; 3] {
        let (row, heads, slots) = (dim + 16, self.case.heads.1, self.slots());
        match self.case.hnd {
            true => [heads * slots * row, row, slots * row],
            false => [heads * slots * row, heads * row, row],
        }
    }

    /// First element of K or V of a key.
    pub(crate) fn element(&self, dim: usize, segment: &Segment, (key, head): (usize, usize)) -> usize {
        let ([page, token, of_head], (at, slot)) = (self.strides(dim), self.place(segment, key));
        at * page + slot * token + head * of_head
    }

    /// Scale of a key (0) or its value (1).
    pub(crate) fn factor(&self, of: usize, segment: &Segment, (key, head): (usize, usize)) -> f64 {
        f64::from(self.case.factor(of, self.place(segment, key).0, head))
    }

    /// Scales of keys (0) or values (1) in memory: `[pages, heads + 1]`, with a NaN after the heads of a page.
    fn scales(&self, of: usize, memory: &mut Memory) -> ScaleTensor {
        let (case, heads) = (&self.case, self.case.heads.1);
        let of_page = |page| (0..heads).map(move |head| case.factor(of, page, head)).chain([f32::NAN]);
        let factors: Vec<f32> = (0..self.num_pages()).flat_map(of_page).collect();
        let mut array =
            |page| ScaleTensor { address: memory.alloc_from(&factors), page, head: 1, value: f32::NAN };
        match (case.scales, of) {
            (Scales::One, _) => ScaleTensor::default(),
            (Scales::Tensor, _) => ScaleTensor { value: case.factor(of, 0, 0), ..ScaleTensor::default() },
            (Scales::Head, _) | (Scales::Mixed, 0) => array(0),
            (Scales::Page, _) => ScaleTensor { head: 0, ..array(heads as u64 + 1) },
            (Scales::Mixed, _) => array(heads as u64 + 1),
        }
    }

    /// First element of a query or output row.
    pub(crate) fn row(&self, dim: usize, row: usize, head: usize) -> usize {
        (row * self.case.heads.0 + head) * (dim + self.case.padding())
    }

    /// Magnitude of a key, by its relative position in the segment.
    fn magnitude(&self, is_key: bool, along: f64) -> f64 {
        if is_key { 1.0 + (self.case.growth - 1.0) * along } else { 1.0 }
    }

    fn fill(&mut self) {
        let (case, dim) = (self.case.clone(), self.case.dim);
        let elements = case.num_rows() * case.heads.0 * (dim.qk + case.padding());
        self.q = (0..elements).flat_map(|at| bytes(case.q(), case.query_factor * noise(1, at))).collect();
        // memory outside of keys is NaN, or the maximum of the dtype if it has no NaN
        let poison = |dim: usize| bytes(case.kv, f64::NAN).repeat(self.pool(dim));
        let (mut k, mut v) = (poison(dim.qk), poison(dim.vo));
        let size = case.kv.size();
        for (number, segment) in self.segments.iter().enumerate() {
            for (key, head) in (0..segment.kv_len).flat_map(|key| (0..case.heads.1).map(move |h| (key, h))) {
                for (pool, dim, seed) in [(&mut k, dim.qk, 2), (&mut v, dim.vo, 3)] {
                    let at = self.element(dim, segment, (key, head)) * size;
                    let magnitude = self.magnitude(seed == 2, key as f64 / segment.kv_len as f64);
                    let number =
                        |d: usize| magnitude * noise(seed + 8 * number as u64, (key * 64 + head) * 512 + d);
                    let constant = case.constant_value(key, segment.kv_len).filter(|_| seed == 3);
                    let number = |d: usize| constant.unwrap_or_else(|| number(d));
                    let row: Vec<u8> = (0..dim).flat_map(|d| bytes(case.kv, number(d))).collect();
                    pool[at..][..row.len()].copy_from_slice(&row);
                }
            }
        }
        for &(request, key, value) in &case.spoiled {
            let segment = &self.segments[request + usize::from(case.prefix > 0)];
            let spoil = |pool: &mut Vec<u8>, dim: usize, d: usize| {
                let at = self.element(dim, segment, (key, 0)) + d;
                pool[at * size..][..size].copy_from_slice(&bytes(case.kv, value));
            };
            match case.is_latent() {
                true => spoil(&mut k, dim.qk, key % dim.vo),
                false => spoil(&mut v, dim.vo, key % dim.vo),
            }
            if !case.is_latent() && value.is_nan() && value.is_sign_positive() {
                spoil(&mut k, dim.qk, 0);
            }
        }
        (self.k, self.v) = (k, v);
    }

    /// Pieces of all keys of each segment.
    pub(crate) fn schedule(&self) -> Schedule {
        let case = &self.case;
        let cut = Cut {
            rows: case.q_rows(&self.variant),
            keys: case.piece,
            workers: case.workers,
            has_merge_launch: case.has_merge_launch,
        };
        Schedule::new(&self.segments, request_rows(&case.lengths), (case.group(), cut))
    }

    pub(crate) fn run(&self, bodies: Bodies, kernel: &Kernel, seed: u64) -> Result<Outcome, Fault> {
        let (case, dim) = (&self.case, self.case.dim);
        let mut memory = Memory::new();
        let schedule = self.schedule();
        let rows = case.num_rows() * case.heads.0;
        let o_elements = rows * (dim.vo + case.padding());
        let size = case.out().size();
        let (o, lse) = (memory.alloc(o_elements * size), memory.alloc(rows * 4));
        let partial_o = memory.alloc(schedule.partial_rows * dim.vo * 4);
        let (q, k, v, pe) = self.tensors(&mut memory);
        let plan = schedule.args(&mut memory, &self.indices, &case.mask_bits().0);
        let call = AttentionParams {
            q,
            k,
            v,
            pe,
            o: self.rows_at(o, dim.vo),
            lse,
            partial_o,
            partial_stats: memory.alloc(schedule.partial_rows * 8),
            plan,
            qo_heads: case.heads.0 as u32,
            group: case.group() as u32,
            page_size: case.page_size as u32,
            layout: case.layout,
            left: case.mask.0,
            right: case.mask.1,
            scale: self.scale() as f32,
            k_scale: self.scales(0, &mut memory),
            v_scale: self.scales(1, &mut memory),
            own: OwnParams::default(),
            variant: self.hook_arguments(&mut memory),
        };
        assert!(case.takes(&self.variant, &call), "{call:?}");
        let arrival_counters = call.plan.arrival_counters;
        let ticket = memory.alloc_from(&[0_u32]);
        let large_merges = memory.alloc_from(&vec![0_u32; 2 + schedule.merges.len()]);
        let mut launches = match case.body {
            Body::MlaWgmma => vec![self.mla_launch(&call, large_merges)],
            Body::Wgmma => self.run_launches(&call, (schedule.items.len(), ticket)),
            _ => vec![self.item_launch(&call, bodies, seed)],
        };
        if seed % 2 == 1 {
            launches.reverse();
        }
        for (ctas, args) in &launches {
            Launch { kernel, grid: [*ctas as u32, 1, 1], args, seed }.run(&mut memory)?;
        }
        let large = (&*launches[0].1, large_merges);
        self.run_other_merges(&call, (schedule.merges.len() as u32, large), seed, &mut memory)?;
        assert_eq!(memory.read::<u32>(ticket, 1)?, [0], "the ticket is not reset");
        assert!(memory.read::<u32>(arrival_counters, schedule.merges.len())?.iter().all(|&count| count == 0));
        Ok(Outcome {
            o: self.read_outputs(&memory, o)?,
            lse: Some(memory.read(lse, rows)?),
            weights: case.weights(),
        })
    }

    /// The outputs. The padding between heads must stay unwritten.
    fn read_outputs(&self, memory: &Memory, o: u64) -> Result<Vec<f32>, Fault> {
        let (case, dim, size) = (&self.case, self.case.dim, self.case.out().size());
        let mut found = Vec::new();
        for at in 0..case.num_rows() * case.heads.0 {
            let [first, end] = [0, dim.vo].map(|d| o + ((at * (dim.vo + case.padding()) + d) * size) as u64);
            let words = memory.read::<u16>(first, dim.vo * size / 2)?;
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            found.extend(bytes.chunks(size).map(|bytes| number(case.out(), bytes) as f32));
            assert!(memory.read::<u16>(end, 1).is_err(), "written beyond a head");
        }
        Ok(found)
    }

    /// Launches the kernels of merges without arrivals, and of large merges, whose list is empty afterwards.
    fn run_other_merges(
        &self,
        call: &AttentionParams,
        (merges, (args, list)): (u32, (&[Arg], u64)),
        seed: u64,
        memory: &mut Memory,
    ) -> Result<(), Fault> {
        let case = &self.case;
        if case.has_merge_launch {
            let kernel = AttentionKernel::LevelMerges(case.wgmma_config(&self.variant));
            let own = OwnParams { num_merges: Some(merges), ..OwnParams::default() };
            let of_merges = &args_of(call, own, KernelKind::LevelMerges);
            run_merges(&kernel, &self.variant, (2, of_merges, 0), memory)?;
        }
        if case.body == Body::MlaWgmma {
            let kernel = AttentionKernel::LargeMerges(case.mla_wgmma_config());
            run_merges(&kernel, &self.variant, (3, args, seed), memory)?;
            assert_eq!(memory.read::<u32>(list, 2)?, [0, 0], "the list of large merges is not empty");
        }
        Ok(())
    }

    /// CTAs and arguments of the launch of a kernel with workers.
    fn item_launch(&self, call: &AttentionParams, bodies: Bodies, seed: u64) -> (usize, Vec<Arg>) {
        let case = &self.case;
        let AttentionKernel::Items(kernel) = case.kernel(bodies, &self.variant) else {
            panic!("{bodies:?} are not of items")
        };
        let boxes = bodies.box_keys().map(|keys| self.box_maps(call, keys));
        let own = OwnParams { wait: case.wait(bodies, seed), boxes, ..OwnParams::default() };
        (case.workers, args_of(call, own, kernel.kind()))
    }

    /// CTAs and arguments of the launches of the `wgmma` kernel, whose runs are all items: one launch, or two in any order.
    fn run_launches(&self, call: &AttentionParams, (runs, ticket): (usize, u64)) -> Vec<(usize, Vec<Arg>)> {
        let (case, config) = (&self.case, self.case.wgmma_config(&self.variant));
        let box_rows = config.box_rows(call);
        let map = |tensor, dim| self.map((tensor, dim), box_rows);
        let maps = [map(call.k, case.dim.qk), map(call.v, case.dim.vo)];
        let first = case.workers.min(runs);
        let (runs, started, ctas) = (runs as u32, first as u32, (first + case.second) as u32);
        let params = RunParams { runs, started, ctas, is_second: false, ticket, box_rows, maps };
        let args =
            |runs| args_of(call, OwnParams { runs: Some(runs), ..OwnParams::default() }, KernelKind::Runs);
        let mut launches = vec![(first * config.ctas() as usize, args(params.clone()))];
        if case.second > 0 {
            launches.push((case.second, args(RunParams { is_second: true, ..params })));
        }
        launches
    }

    /// CTAs and arguments of the launch of the `mla_wgmma` kernel.
    fn mla_launch(&self, call: &AttentionParams, large_merges: u64) -> (usize, Vec<Arg>) {
        let (dim, box_rows) = (self.case.dim, self.case.mla_wgmma_config().box_rows(call));
        let pe = call.pe.expect("latent attention");
        let maps = [self.map((call.k, dim.vo), box_rows), self.map((pe.k, dim.qk - dim.vo), box_rows)];
        let ctas = self.case.workers * self.case.mla_wgmma_config().ctas_per_item();
        let latent = Some(MlaWgmmaParams { box_rows, maps, large_merges });
        let own = OwnParams { latent, ..OwnParams::default() };
        (ctas, args_of(call, own, KernelKind::MlaWgmma))
    }

    /// The tensor map of keys or values.
    fn map(&self, (tensor, dim): (CacheTensor, usize), box_rows: u32) -> TensorMap {
        kv_map(tensor, self.case.kv.size(), self.map_dims(dim), box_rows)
    }

    /// The tensor maps of keys and values in boxes of `mma`.
    fn box_maps(&self, call: &AttentionParams, keys: usize) -> [TensorMap; 2] {
        let HeadDim { qk, vo } = self.case.dim;
        let map = |(tensor, dim)| box_map(tensor, self.map_dims(dim), keys);
        [(call.k, qk), (call.v, vo)].map(map)
    }

    fn map_dims(&self, dim: usize) -> [u64; 4] {
        let (pages, slots) = match self.case.layout {
            // one ragged tensor
            KvLayout::Blocks => (1, self.num_pages() * self.slots()),
            _ => (self.num_pages(), self.slots()),
        };
        [pages, slots, self.case.heads.1, dim].map(|dim| dim as u64)
    }

    /// Query, key and value tensors, and the positional part of latent attention.
    fn tensors(&self, memory: &mut Memory) -> (RowTensor, CacheTensor, CacheTensor, Option<PeTensors>) {
        let (case, dim) = (&self.case, self.case.dim);
        let cache = |address, dim| {
            let [page, token, head] = self.strides(dim).map(|stride| stride as u64);
            CacheTensor { address, page, token, head }
        };
        let q = self.rows_at(memory.alloc_bytes(&self.q), dim.qk);
        match case.is_latent() {
            false => {
                let [k, v] = [&self.k, &self.v].map(|pool| memory.alloc_bytes(pool));
                (q, cache(k, dim.qk), cache(v, dim.vo), None)
            }
            true => {
                let [k, pe] = [0..dim.vo, dim.vo..dim.qk].map(|part| memory.alloc_bytes(&self.part(part)));
                let pe_of_q = RowTensor { address: q.address + (dim.vo * case.qo.size()) as u64, ..q };
                let pe = PeTensors { q: pe_of_q, k: cache(pe, dim.qk - dim.vo) };
                (q, cache(k, dim.vo), CacheTensor::default(), Some(pe))
            }
        }
    }

    /// A tensor of a part of all keys; memory outside of keys is NaN.
    fn part(&self, part: Range<usize>) -> Vec<u8> {
        let (case, size) = (&self.case, self.case.kv.size());
        let mut pool = bytes(case.kv, f64::NAN).repeat(self.pool(part.len()));
        for segment in &self.segments {
            for key in 0..segment.kv_len {
                let from = (self.element(case.dim.qk, segment, (key, 0)) + part.start) * size;
                let to = self.element(part.len(), segment, (key, 0)) * size;
                pool[to..][..part.len() * size].copy_from_slice(&self.k[from..][..part.len() * size]);
            }
        }
        pool
    }

    /// Queries or outputs.
    fn rows_at(&self, address: u64, dim: usize) -> RowTensor {
        let head = (dim + self.case.padding()) as u64;
        RowTensor { address, row: self.case.heads.0 as u64 * head, head }
    }

    fn hook_arguments(&self, memory: &mut Memory) -> Vec<Arg> {
        let tables: Vec<u64> =
            self.variant.tables().iter().map(|(_, table)| memory.alloc_from(table)).collect();
        arguments(&self.variant, |table| tables[table], |_| unreachable!("hooks with buffers are refused"))
    }

    pub(crate) fn scale(&self) -> f64 {
        1.5 / (self.case.dim.qk as f64).sqrt() / self.case.query_factor
    }
}

/// Launches a kernel of merges alone.
pub(crate) fn run_merges(
    kernel: &AttentionKernel,
    variant: &ExpressionVariant,
    (ctas, args, seed): (u32, &[Arg], u64),
    memory: &mut Memory,
) -> Result<(), Fault> {
    let kernel = &kernel.record(&kernel.name(variant), variant).expect("a supported configuration");
    Launch { kernel, grid: [ctas, 1, 1], args, seed }.run(memory).map(drop)
}

/// The arguments of a kernel.
fn args_of(call: &AttentionParams, own: OwnParams, kind: KernelKind) -> Vec<Arg> {
    AttentionParams { own, ..call.clone() }.args(kind)
}
