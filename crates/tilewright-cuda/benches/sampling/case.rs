//! Cases of the sampling bench, and their launches on the device.

use super::contender::{BenchCase, OurGraph};
use serde_json::json;
use std::error::Error;
use tilewright::{DeviceMemory, SamplingParams, sampling::FilterOrder};
use tilewright_cuda::{Cuda, Device, machine::Machine};
use tilewright_kernels::sampling::{
    ROW_OUTCOME_WORDS, RequestSources, RowCtas, RowKind, SampleParams, request_words, sample,
};

const VOCAB: usize = 128_256;
/// Bytes that cold cases rotate over.
const COLD_BYTES: usize = 256 << 20;
/// Bytes of the block of logits that is repeated.
const BLOCK: usize = 16 << 20;

/// Distribution of the logits.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Logits {
    /// Normal with this standard deviation: 1 is flat, 3 is wide.
    Normal(f32),
    /// Normal with standard deviation 1; one of 4,096 logits is 12 larger.
    Peaked,
}

/// Rows of f32 logits and their requests.
#[derive(Debug)]
pub(crate) struct Case {
    label: &'static str,
    logits: Logits,
    rows: usize,
    params: SamplingParams,
    cold: bool,
}

impl Case {
    /// All cases, warm and cold.
    pub(crate) fn all() -> Vec<Self> {
        let plain = SamplingParams::default();
        let top_p = SamplingParams { top_p: 0.9, ..plain };
        let both = SamplingParams { top_k: Some(50), ..top_p };
        let wide = Logits::Normal(3.0);
        let kinds = [
            ("top_k_top_p", wide, 1, both),
            ("top_k_top_p", wide, 64, both),
            ("top_k_top_p", wide, 256, both),
            ("joint", wide, 64, SamplingParams { order: FilterOrder::Joint, ..both }),
            ("top_p_peaked", Logits::Peaked, 64, top_p),
            ("top_p_flat", Logits::Normal(1.0), 64, top_p),
            ("top_p_wide", wide, 64, top_p),
            ("plain", wide, 64, plain),
            ("greedy", wide, 64, SamplingParams { temperature: 0.0, ..plain }),
            ("min_p", wide, 64, SamplingParams { min_p: 0.05, ..plain }),
            ("top_k_1000", wide, 64, SamplingParams { top_k: Some(1000), ..plain }),
        ];
        let of = |cold| kinds.map(|(label, logits, rows, params)| Self { label, logits, rows, params, cold });
        of(false).into_iter().chain(of(true)).collect()
    }

    /// Bytes of one set of logits: each is read once at least.
    fn bytes(&self) -> usize {
        self.rows * VOCAB * 4
    }

    /// Sets of logits that calls use in turn.
    fn sets(&self) -> usize {
        if self.cold { COLD_BYTES.div_ceil(self.bytes()).max(2) } else { 1 }
    }

    /// A block of logits.
    fn block(&self) -> Vec<f32> {
        let mut state = 1_u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 + 0.5) / (1_u32 << 24) as f32
        };
        let mut normal = || (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos();
        let logit = |i: usize| match self.logits {
            Logits::Normal(deviation) => deviation * normal(),
            Logits::Peaked => normal() + if i.is_multiple_of(4096) { 12.0 } else { 0.0 },
        };
        (0..BLOCK / 4).map(logit).collect()
    }
}

impl BenchCase for Case {
    fn name(&self) -> String {
        format!("{} b{} {}", self.label, self.rows, if self.cold { "cold" } else { "warm" })
    }

    fn graph(&self, gpu: &Cuda) -> Result<OurGraph, Box<dyn Error>> {
        let device = gpu.clone();
        OurGraph::new(gpu, self.sets(), Launch::new(gpu, self)?, move |launch, set| launch.run(&device, set))
    }

    fn request(&self) -> String {
        let (deviation, peaked) = match self.logits {
            Logits::Normal(deviation) => (deviation, false),
            Logits::Peaked => (1.0, true),
        };
        let SamplingParams { temperature, top_k, top_p, min_p, order, .. } = self.params;
        json!({"case": {
            "rows": self.rows, "vocab": VOCAB, "sets": self.sets(), "deviation": deviation, "peaked": peaked,
            "greedy": temperature == 0.0, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "joint": order == FilterOrder::Joint,
        }})
        .to_string()
    }

    fn columns(&self, _contender: &str, median: f64) -> String {
        format!("{:.3}", self.bytes() as f64 / median * 1e-12)
    }
}

/// The kernel of a case with its memory on the device.
struct Launch {
    kernel: <Device as Machine>::Function,
    ctas: u32,
    rows: usize,
    /// Logits, one per set.
    sets: Vec<DeviceMemory>,
    requests: DeviceMemory,
    outcomes: DeviceMemory,
}

impl Launch {
    /// Loads the kernel that the backend uses for these rows, and uploads logits and requests.
    fn new(gpu: &Cuda, case: &Case) -> Result<Self, Box<dyn Error>> {
        let limits = gpu.machine().limits();
        let of_row = RowCtas::choose([case.rows, VOCAB], limits.arch, limits.multiprocessors);
        let kernel = gpu.machine().load(&sample::<f32>("sample", RowKind::Logits, of_row)?)?;
        let block = case.block();
        let block: &[u8] = bytemuck::cast_slice(&block);
        let upload = |_| {
            let memory = gpu.allocate(case.bytes())?;
            for begin in (0..case.bytes()).step_by(block.len()) {
                let part = &block[..block.len().min(case.bytes() - begin)];
                gpu.machine().write(memory.address() + begin as u64, part)?;
            }
            tilewright::Result::Ok(memory)
        };
        let sets = (0..case.sets()).map(upload).collect::<tilewright::Result<Vec<_>>>()?;
        let request = |seed| request_words(&SamplingParams { seed, ..case.params });
        let words: Vec<u32> = (0..case.rows as u64).flat_map(request).collect();
        let requests = gpu.allocate(words.len() * 4)?;
        gpu.machine().write(requests.address(), bytemuck::cast_slice(&words))?;
        let outcomes = gpu.allocate(case.rows * ROW_OUTCOME_WORDS * 4)?;
        Ok(Self { kernel, ctas: case.rows as u32 * of_row.ctas, rows: case.rows, sets, requests, outcomes })
    }

    /// Samples each row of a set.
    fn run(&self, gpu: &Cuda, set: usize) -> tilewright::Result<()> {
        let params = SampleParams {
            scores: self.sets[set].address(),
            stride: VOCAB as u64,
            shape: [self.rows as u32, VOCAB as u32],
            row_ids: 0,
            outcomes: self.outcomes.address(),
            tokens: 0,
            valid: 0,
            requests: RequestSources::records(self.requests.address()),
        };
        gpu.machine().launch(&self.kernel, [self.ctas, 1, 1], &params.all_args())
    }
}
