//! Runs the kernel on a sample in the simulator and reads the outputs.

use super::{
    elements::Elements,
    sample::Sample,
    schedule::{Cut, Schedule, Segment, request_rows},
    storage::{Storage, Stored},
};
use std::ops::Range;
use tilewright::{
    Dtype, Mask, View,
    attention::variant::{ExpressionVariant, Variant},
    tensor::Data,
};
use tilewright_kernels::{
    attention::{
        body::simt::{SimtConfig, attention},
        items::RequestRows,
        params::{AttentionParams, CacheTensor, KvLayout, PeTensors, RowTensor, ScaleTensor, UNLIMITED},
    },
    variant::arguments,
};
use tilewright_ptx::{
    ir::Kernel,
    sim::{Launch, Memory},
};

/// Outputs, widened to f32.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    /// `[num_rows, num_qo_heads, head_dim_vo]`
    pub(crate) o: Vec<f32>,
    /// `[num_rows, num_qo_heads]`, where there is one.
    pub(crate) lse: Option<Vec<f32>>,
    /// Rounding of the weights: none.
    pub(crate) weights: Dtype,
}

impl Outcome {
    /// Bit patterns, for exact comparison.
    pub(crate) fn bits(&self) -> Vec<u32> {
        self.o.iter().chain(self.lse.iter().flatten()).map(|value| value.to_bits()).collect()
    }
}

/// A sample, a variant and a split.
#[derive(Clone)]
pub(crate) struct Case<'a> {
    pub(crate) sample: &'a Sample,
    pub(crate) stored: &'a Stored,
    pub(crate) storage: Storage,
    pub(crate) variant: &'a ExpressionVariant,
    pub(crate) cut: Cut,
    /// Segments, if not one per request.
    pub(crate) segments: Option<Vec<Segment>>,
    pub(crate) mask_bits: Vec<u8>,
    /// Block size of a ragged tensor, and the block list of all segments.
    pub(crate) blocks: Option<(usize, Vec<u32>)>,
    /// KV scales with their `page, head` strides.
    pub(crate) scales: [(Vec<f32>, [u64; 2]); 2],
    pub(crate) has_lse: bool,
    pub(crate) seed: u64,
}

impl<'a> Case<'a> {
    /// One segment per request, defaults otherwise.
    pub(crate) fn new(
        (sample, stored, storage): (&'a Sample, &'a Stored, Storage),
        variant: &'a ExpressionVariant,
        cut: Cut,
    ) -> Self {
        let scales = [(); 2].map(|()| (Vec::new(), [0, 0]));
        let has_lse = variant.has_softmax();
        Self {
            sample,
            stored,
            storage,
            variant,
            cut,
            segments: None,
            mask_bits: Vec::new(),
            blocks: None,
            scales,
            has_lse,
            seed: 0,
        }
    }

    pub(crate) fn config(&self) -> SimtConfig {
        let problem = &self.sample.problem;
        let dim = problem.head_dim();
        SimtConfig {
            dtype_q: problem.dtype_q(),
            dtype_o: problem.dtype_o(),
            dtype_kv: problem.dtype_kv(),
            head_dim: (dim.qk as u32, dim.vo as u32),
            mla: problem.is_latent(),
        }
    }

    pub(crate) fn kernel(&self) -> Kernel {
        attention("attend", self.config(), self.variant).expect("a valid kernel")
    }

    pub(crate) fn requests(&self) -> (Vec<RequestRows>, Vec<Segment>) {
        let requests = request_rows(&self.sample.lens);
        let segment = |(r, &(qo_len, kv_len)): (usize, &(usize, usize))| Segment {
            qo: requests[r].end as usize - qo_len..requests[r].end as usize,
            kv_heads: 0..self.sample.problem.heads().kv,
            kv_start: self.stored.kv_indptr[r] as usize,
            kv_len,
            base: 0,
            request: Some(r),
            shared: false,
            mask: None,
        };
        let segments = self.sample.lens.iter().enumerate().map(segment).collect();
        (requests, segments)
    }

    fn schedule(&self) -> Schedule {
        let (requests, one_each) = self.requests();
        let segments = self.segments.as_ref().unwrap_or(&one_each);
        let visible = |segment: &Segment, qo: Range<usize>| {
            let (Some(request), None) = (segment.request, &self.blocks) else { return 0..segment.kv_len };
            let position = |row: usize| row as i64 + i64::from(requests[request].offset);
            let local = |at: i64| (at - segment.base as i64).clamp(0, segment.kv_len as i64) as usize;
            let (left, right) = self.mask_limits();
            let first = if left == UNLIMITED { 0 } else { local(position(qo.start) - i64::from(left)) };
            let unlimited = segment.kv_len;
            let end = if right == UNLIMITED {
                unlimited
            } else {
                local(position(qo.end - 1) + i64::from(right) + 1)
            };
            first.min(end)..end
        };
        let split = (self.sample.problem.heads().group(), self.cut);
        let mut schedule = Schedule::new(segments, requests.clone(), split, visible);
        // reversed, so that merges depend on items of other workers in every order
        schedule.items.reverse();
        schedule
    }

    /// Left and right limits of the mask.
    fn mask_limits(&self) -> (u32, u32) {
        match self.sample.problem.mask() {
            Mask::Full => (UNLIMITED, UNLIMITED),
            Mask::Causal => (UNLIMITED, 0),
            Mask::Window { left, right } => (left, right.unwrap_or(UNLIMITED)),
        }
    }

    pub(crate) fn run(&self) -> Outcome {
        self.run_kernel(&self.kernel())
    }

    pub(crate) fn run_kernel(&self, kernel: &Kernel) -> Outcome {
        let (mut memory, schedule) = (Memory::new(), self.schedule());
        let (o, lse) = self.outputs(&mut memory);
        let call = self.call(&mut memory, &schedule, (o, lse));
        let mut args = call.all_args();
        args.extend(self.variant_args(&mut memory).0);
        let grid = [self.cut.workers as u32, 1, 1];
        Launch { kernel, grid, args: &args, seed: self.seed }.run(&mut memory).unwrap_or_else(|fault| {
            panic!("{}, {:?}, seed {}: {fault}", self.sample.problem, self.cut, self.seed)
        });
        let counters: Vec<u32> =
            memory.read(call.plan.arrival_counters, schedule.merges.len()).expect("they were filled");
        assert!(counters.iter().all(|count| *count == 0), "counters are 0 after a run");
        self.read(&memory, o, lse)
    }

    fn rows(&self) -> usize {
        self.sample.num_rows() * self.sample.problem.heads().qo
    }

    /// Head stride of O: padded, and the padding must stay unwritten.
    fn o_stride(&self) -> usize {
        self.sample.problem.head_dim().vo + 3
    }

    fn outputs(&self, memory: &mut Memory) -> (u64, u64) {
        let size = self.sample.problem.dtype_o().size();
        let o = memory.alloc(self.rows() * self.o_stride() * size);
        (o, if self.has_lse { memory.alloc(self.rows() * 4) } else { 0 })
    }

    fn read(&self, memory: &Memory, o: u64, lse: u64) -> Outcome {
        let problem = &self.sample.problem;
        let (vo, size) = (problem.head_dim().vo, problem.dtype_o().size());
        let row = |row: usize| -> Vec<f32> {
            let at = o + (row * self.o_stride() * size) as u64;
            let gap = memory.read::<u16>(at + (vo * size) as u64, 3 * size / 2);
            assert!(gap.is_err(), "what lies between heads is not written");
            let whole = "every element is written";
            match problem.dtype_o() {
                Dtype::F16 => {
                    memory.read::<half::f16>(at, vo).expect(whole).iter().map(|x| x.to_f32()).collect()
                }
                Dtype::Bf16 => {
                    memory.read::<half::bf16>(at, vo).expect(whole).iter().map(|x| x.to_f32()).collect()
                }
                _ => memory.read::<f32>(at, vo).expect(whole),
            }
        };
        let lse = self.has_lse.then(|| memory.read(lse, self.rows()).expect("every row has one"));
        Outcome { o: (0..self.rows()).flat_map(row).collect(), lse, weights: Dtype::F32 }
    }

    /// Arguments of the variant and addresses of its buffers.
    fn variant_args(&self, memory: &mut Memory) -> (Vec<tilewright_ptx::sim::Arg>, Vec<u64>) {
        let tables: Vec<u64> =
            self.variant.tables().iter().map(|(_, table)| memory.alloc_from(table)).collect();
        let nan = |len: usize| vec![f32::NAN; len];
        let buffers: Vec<u64> =
            self.variant.buffers().iter().map(|(_, buffer)| memory.alloc_from(&nan(buffer.len()))).collect();
        (arguments(self.variant, |table| tables[table], |buffer| buffers[buffer]), buffers)
    }

    /// Runs the kernel and returns the first buffer of the variant.
    pub(crate) fn run_for_buffer(&self) -> Vec<f32> {
        let (mut memory, schedule) = (Memory::new(), self.schedule());
        let outputs = self.outputs(&mut memory);
        let call = self.call(&mut memory, &schedule, outputs);
        let (variant_args, buffers) = self.variant_args(&mut memory);
        let args = [call.all_args(), variant_args].concat();
        let (kernel, grid) = (self.kernel(), [self.cut.workers as u32, 1, 1]);
        Launch { kernel: &kernel, grid, args: &args, seed: self.seed }
            .run(&mut memory)
            .unwrap_or_else(|fault| panic!("{fault}"));
        memory.read(buffers[0], self.variant.buffers()[0].1.len()).expect("it was filled")
    }

    fn call(&self, memory: &mut Memory, schedule: &Schedule, (o, lse): (u64, u64)) -> AttentionParams {
        let problem = &self.sample.problem;
        let (heads, dim, config) = (problem.heads(), problem.head_dim(), self.config());
        let (left, right) = self.mask_limits();
        let q = Elements::new(config.dtype_q, &self.sample.q);
        let q = upload(memory, q.data());
        let q = |first: usize| RowTensor {
            address: q + (first * config.dtype_q.size()) as u64,
            row: (heads.qo * dim.qk) as u64,
            head: dim.qk as u64,
        };
        let cache = self.stored.cache();
        let tensor =
            |memory: &mut Memory, view: &View<'_>| self.cache_tensor(upload(memory, view.data()), view);
        let k = tensor(memory, &cache.k);
        let v = tensor(memory, &cache.v);
        let (k, v) = self.blocks.as_ref().map_or((k, v), |(block, _)| {
            let of_blocks =
                |tensor: CacheTensor| CacheTensor { page: tensor.token * *block as u64, ..tensor };
            (of_blocks(k), of_blocks(v))
        });
        let pe_at = k.address + (dim.vo * config.dtype_kv.size()) as u64;
        let pe = PeTensors { q: q(dim.vo), k: CacheTensor { address: pe_at, ..k } };
        let (row, head) = ((heads.qo * self.o_stride()) as u64, self.o_stride() as u64);
        let partials = (schedule.partial_rows, schedule.partial_rows * dim.vo);
        let pages = || self.stored.indices.iter().map(|page| page.cast_unsigned()).collect();
        let indices: Vec<u32> = self.blocks.as_ref().map_or_else(pages, |(_, blocks)| blocks.clone());
        let plan = schedule.args(memory, &indices, &self.mask_bits);
        let [k_scale, v_scale] = self.scales.each_ref().map(|(factors, [page, head])| match factors[..] {
            [] => ScaleTensor::default(),
            [factor] => ScaleTensor { value: factor, ..ScaleTensor::default() },
            _ => {
                ScaleTensor { address: memory.alloc_from(factors), page: *page, head: *head, value: f32::NAN }
            }
        });
        AttentionParams {
            q: q(0),
            k,
            v,
            pe: problem.is_latent().then_some(pe),
            o: RowTensor { address: o, row, head },
            lse,
            partial_o: memory.alloc(4 * partials.1),
            partial_stats: memory.alloc(8 * partials.0),
            plan,
            qo_heads: heads.qo as u32,
            group: heads.group() as u32,
            page_size: self.blocks.as_ref().map_or(self.stored.page_size(), |(block, _)| *block) as u32,
            layout: match (&self.blocks, self.storage) {
                (Some(_), _) => KvLayout::Blocks,
                (None, Storage::Ragged) => KvLayout::Ragged,
                (None, Storage::Paged(_)) => KvLayout::Paged,
            },
            left,
            right,
            scale: problem.scale(),
            k_scale,
            v_scale,
            variant: Vec::new(),
        }
    }

    fn cache_tensor(&self, address: u64, view: &View<'_>) -> CacheTensor {
        let strides: Vec<u64> = view.strides().iter().map(|stride| *stride as u64).collect();
        let nhd = self.sample.problem.layout() == tilewright::KvLayout::Nhd;
        let (page, token, head) = match (strides.as_slice(), nhd) {
            (&[page, token, head, _], true) | (&[page, head, token, _], false) => (page, token, head),
            (&[token, head, _], true) | (&[head, token, _], false) => (0, token, head),
            (other, _) => panic!("{other:?} are no strides of a cache"),
        };
        CacheTensor { address, page, token, head }
    }
}

fn upload(memory: &mut Memory, data: Data<'_>) -> u64 {
    match data {
        Data::F32(values) => memory.alloc_from(values),
        Data::F16(values) => memory.alloc_from(values),
        Data::Bf16(values) => memory.alloc_from(values),
        Data::E4m3(values) => memory.alloc_bytes(&values.iter().map(|x| x.to_bits()).collect::<Vec<u8>>()),
        Data::E5m2(values) => memory.alloc_bytes(&values.iter().map(|x| x.to_bits()).collect::<Vec<u8>>()),
        Data::I8(values) => {
            memory.alloc_bytes(&values.iter().map(|x| x.cast_unsigned()).collect::<Vec<u8>>())
        }
    }
}
