//! A case on the device: sets of tensors of noise, pages in random order, a plan, and a recorded graph of calls.

use super::{
    case::{Case, VariantKind},
    contender::Shuffle,
};
use half::bf16;
use std::{error::Error, time::Instant};
use tilewright::{
    Attention, Batch, Dtype, HeadDim, Heads, KvCache, KvLayout, Output, PageTable, Plan, Problem, Workspace,
    attention::{
        LatentCache, LatentQuery, PackedMask,
        variant::{Alibi, AttentionSinks, SoftCap},
    },
    tensor::DeviceMemory,
};
use tilewright_cuda::{Cuda, machine::Machine};

/// Bytes of the block of noise that is repeated.
const NOISE: usize = 16 << 20;

pub(crate) struct Ours {
    attention: Attention<Cuda>,
    pub(crate) plan: Plan,
    /// Median host time of a plan including its upload.
    pub(crate) plan_seconds: f64,
    /// Shapes of queries, keys, values and outputs; for latent attention without the extra elements.
    shapes: [Vec<usize>; 4],
    /// The number of these extra elements.
    beside: Option<usize>,
    kv_dtype: Dtype,
    sets: Vec<Tensors>,
    workspace: Workspace,
}

/// One set of inputs and its output.
struct Tensors {
    q: DeviceMemory,
    k: DeviceMemory,
    v: DeviceMemory,
    o: DeviceMemory,
}

/// Sets of inputs that calls use in turn.
pub(crate) const SETS: usize = 3;

fn indptr(lens: impl Iterator<Item = usize>) -> Vec<i32> {
    let sums = lens.scan(0, |sum, len| {
        *sum += len as i32;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

/// Fills device memory with numbers in -0.5..0.5; 8-bit floats are never NaN, and integers are in -127..127.
fn noise(gpu: &Cuda, bytes: usize, dtype: Dtype) -> Result<DeviceMemory, Box<dyn Error>> {
    let memory = gpu.allocate(bytes)?;
    let number = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 16) as f32 / 65536.0 - 0.5;
    let block: Vec<u8> = match dtype {
        Dtype::Bf16 => {
            let values: Vec<bf16> = (0..NOISE / 2).map(|i| bf16::from_f32(number(i))).collect();
            bytemuck::cast_slice(&values).to_vec()
        }
        Dtype::E4m3 => (0..NOISE).map(|i| tilewright::E4m3::from_f32(number(i)).to_bits()).collect(),
        Dtype::E5m2 => (0..NOISE).map(|i| tilewright::E5m2::from_f32(number(i)).to_bits()).collect(),
        _ => (0..NOISE).map(|i| ((number(i) * 254.0) as i8).cast_unsigned()).collect(),
    };
    for begin in (0..bytes).step_by(NOISE) {
        gpu.machine().write(memory.address() + begin as u64, &block[..NOISE.min(bytes - begin)])?;
    }
    Ok(memory)
}

/// The pages of requests with bounds `indptr`: the first `shared` ones for all, then others of their own.
fn page_indices(indptr: &[i32], order: &[i32], shared: usize) -> Vec<i32> {
    let (of_all, mut rest) = order.split_at(shared);
    let mut indices = Vec::new();
    for bounds in indptr.windows(2) {
        let own;
        (own, rest) = rest.split_at((bounds[1] - bounds[0]) as usize - shared);
        indices.extend(of_all.iter().chain(own));
    }
    indices
}

fn operator(gpu: &Cuda, case: &Case) -> Result<Attention<Cuda>, Box<dyn Error>> {
    let ([qo, kv], dim) = (case.heads, case.head_dim);
    let kv_dtype = case.kv;
    let problem = match case.latent {
        Some(beside) => Problem::latent(qo, dim, beside).scale(1.0 / 192_f32.sqrt()),
        None => Problem::builder(Heads { qo, kv }, HeadDim { qk: dim, vo: case.vo() }),
    };
    let problem = problem.dtypes(Dtype::Bf16, kv_dtype).mask(case.mask());
    let problem = if case.fp8 { problem.fp8_queries() } else { problem }.build()?;
    let sinks: Vec<f32> = (0..qo).map(|head| head as f32 / qo as f32).collect();
    let attention = match case.variant {
        VariantKind::Plain => Attention::new(problem, gpu.clone())?,
        VariantKind::Sinks => Attention::with_variant(problem, AttentionSinks::new(sinks)?, gpu.clone())?,
        VariantKind::SoftCap => Attention::with_variant(problem, SoftCap::new(30.0)?, gpu.clone())?,
        VariantKind::Alibi => Attention::with_variant(problem, Alibi::new(qo), gpu.clone())?,
    };
    Ok(attention)
}

impl Ours {
    pub(crate) fn new(gpu: &Cuda, case: &Case) -> Result<Self, Box<dyn Error>> {
        let ([qo, kv], dim, vo) = (case.heads, case.head_dim, case.vo());
        let kv_dtype = case.kv;
        let attention = operator(gpu, case)?;
        let (qo_lens, kv_lens) = (case.qo_lens.all(), case.kv_lens.all());
        let qo_indptr = indptr(qo_lens.iter().copied());
        let page = case.page_size.unwrap_or(1);
        let pages = indptr(kv_lens.iter().map(|len| len.div_ceil(page)));
        let shared = case.shared / page;
        let count = pages.last().copied().unwrap_or(0) as usize - shared * (kv_lens.len() - 1);
        let order: Vec<i32> = Shuffle(1).of(count).into_iter().map(|page| page as i32).collect();
        let indices = page_indices(&pages, &order, shared);
        let last: Vec<i32> = kv_lens.iter().map(|len| ((len - 1) % page + 1) as i32).collect();
        let batch = match case.page_size {
            Some(page) => Batch::paged(&qo_indptr, PageTable::new(&pages, &indices, &last, page)),
            None => Batch::ragged(&qo_indptr, &pages),
        };
        let mask = case.packed_mask();
        let batch = match &mask {
            Some(bits) => batch.with_mask(PackedMask::new(bits)),
            None => batch,
        };
        let batch = if shared > 0 { batch.with_shared_prefixes() } else { batch };
        let plan = attention.plan(&batch)?;
        let mut times = Vec::new();
        for _ in 0..21 {
            let start = Instant::now();
            drop(attention.plan(&batch)?);
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let rows: usize = qo_lens.iter().sum();
        let cache_shape = |dim: usize| match case.page_size {
            Some(page) if case.latent.is_some() => vec![count, page, dim],
            None if case.latent.is_some() => vec![count, dim],
            Some(page) => KvLayout::Nhd.paged_shape(count, page, kv, dim).to_vec(),
            None => vec![count, kv, dim],
        };
        let (keys, values) = (cache_shape(dim), cache_shape(vo));
        let bytes = |shape: &[usize]| shape.iter().product::<usize>() * kv_dtype.size();
        let row_bytes = rows * qo * dim * if case.fp8 { 1 } else { 2 };
        let set = |_| {
            Ok(Tensors {
                // both parts of latent queries, one after the other
                q: noise(gpu, row_bytes + row_bytes / dim * case.latent.unwrap_or(0), case.q())?,
                k: noise(gpu, bytes(&keys), case.kv)?,
                v: noise(gpu, bytes(&values), case.kv)?,
                o: gpu.allocate(rows * qo * vo * 2)?,
            })
        };
        let sets = (0..SETS).map(set).collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        Ok(Self {
            plan_seconds: times[times.len() / 2],
            shapes: [vec![rows, qo, dim], keys, values, vec![rows, qo, vo]],
            beside: case.latent,
            kv_dtype,
            sets,
            workspace: Workspace::on_device(gpu.allocate(plan.workspace_bytes())?),
            attention,
            plan,
        })
    }

    /// Runs the case with set `set` of the inputs.
    pub(crate) fn run(&mut self, set: usize) -> tilewright::Result<()> {
        let [rows, keys, values, outputs] = &self.shapes;
        let tensors = &mut self.sets[set % SETS];
        let out = Output {
            o: tensors.o.view_mut(Dtype::Bf16, 0, outputs)?,
            lse: None,
            workspace: &mut self.workspace,
        };
        if let Some(beside) = self.beside {
            let of = |shape: &[usize]| [&shape[..shape.len() - 1], &[beside]].concat();
            let parts = 2 * rows.iter().product::<usize>();
            let q = LatentQuery {
                nope: tensors.q.view(Dtype::Bf16, 0, rows)?,
                pe: tensors.q.view(Dtype::Bf16, parts, &of(rows))?,
            };
            let (ckv, kpe) =
                (tensors.k.view(self.kv_dtype, 0, keys)?, tensors.v.view(self.kv_dtype, 0, &of(keys))?);
            return self.attention.run_latent(&self.plan, q, LatentCache { ckv, kpe }, out);
        }
        let kv = KvCache {
            k: tensors.k.view(self.kv_dtype, 0, keys)?,
            v: tensors.v.view(self.kv_dtype, 0, values)?,
        };
        let q = tensors.q.view(self.attention.problem().dtype_q(), 0, rows)?;
        self.attention.run(&self.plan, q, kv, out)
    }

    /// The body that the operator chose.
    pub(crate) fn describe(&self) -> String {
        self.attention.describe()
    }
}
