//! Quantization of rows to 8-bit floats with one scale per group of adjacent elements ([`tilewright::quantization`]).
//!
//! Shapes: x `[rows, width]` f32, f16 or bf16; out `[out_rows, width]` e4m3 or e5m2, any row strides; scales f32 `[out_rows, groups of a
//! row]`, any strides. Sizes and eps are launch parameters.
//!
//! 1. Adjacent lanes load a group: one chunk each, or several of one element if addresses are not aligned.
//! 2. They reduce the maximum of magnitudes as integers, whose order is that of the numbers, with NaN above infinity.
//! 3. Each lane divides its elements by the scale, rounds them, and stores them as it loaded them.
//!
//! A thread handles two groups, to have more loads in flight.

use crate::tile::{Chunk, Elements, Strided, StridedRows, chunk};
use tilewright::Dtype;
use tilewright_ptx::{Access, Arg, Builder, Invalid, Kernel, Value};

const THREADS: u32 = 128;
const GROUPS_PER_THREAD: u32 = 2;

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GroupQuantizationConfig {
    /// Dtypes of x and of the result.
    pub dtypes: (Dtype, Dtype),
    /// Elements that share a scale.
    pub group_size: u32,
    /// Whether scales are powers of two.
    pub power_of_two: bool,
    /// Elements per load: 1, or `chunk::max_width` of both dtypes.
    pub width: u32,
}

crate::params! {
    /// Parameters of one launch.
    #[derive(Debug, Clone, Copy)]
    pub struct GroupQuantizationParams => GroupQuantizationRegs(this, config: GroupQuantizationConfig) {
        /// Dtypes of x and of the result.
        host dtypes: (Dtype, Dtype),
        /// Elements that share a scale.
        host group_size: u32,
        /// Whether scales are powers of two.
        host power_of_two: bool,
        /// Rows of the result, and elements per row.
        host shape: [u32; 2],
        /// The numbers.
        x: Strided[config.dtypes.0],
        /// The result.
        out: Strided[config.dtypes.1],
        /// The scales, with strides of rows and groups.
        scales: Strided[Dtype::F32],
        /// Rows of x.
        rows: u32,
        groups_per_row: u32 = this.shape[1] / config.group_size,
        groups: u32 = this.num_groups(),
        /// Lower bound of the maximum of a group.
        eps: f32,
    }
}

impl GroupQuantizationParams {
    /// Configuration of the kernel for this launch.
    pub fn config(&self) -> GroupQuantizationConfig {
        let Self { dtypes, group_size, power_of_two, .. } = *self;
        let elements = [self.x.alignment(dtypes.0), self.out.alignment(dtypes.1)].concat();
        let width = chunk::width(&[dtypes.0, dtypes.1], elements);
        GroupQuantizationConfig { dtypes, group_size, power_of_two, width }
    }

    /// Grid and arguments for [`GroupQuantizationParams::config`]. Requires 1 to 2^31 groups.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let config = self.config();
        let per_cta = GROUPS_PER_THREAD * config.groups_per_pass();
        ([self.num_groups().div_ceil(per_cta), 1, 1], self.args(config))
    }

    fn num_groups(&self) -> u32 {
        self.shape[0] * (self.shape[1] / self.group_size)
    }
}

impl GroupQuantizationConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        let Self { dtypes: (x, out), group_size, power_of_two, width } = self;
        let power = if power_of_two { "_ue8m0" } else { "" };
        format!("quantize_groups_{x}_to_{out}{power}_{group_size}_{width}")
    }

    /// Lanes per group.
    fn lanes(self) -> u32 {
        (self.group_size / self.width).min(32)
    }

    /// Groups that a CTA reduces at the same time.
    fn groups_per_pass(self) -> u32 {
        THREADS / self.lanes()
    }
}

/// Chunks of a group in the registers of a lane.
struct LoadedGroup<'k> {
    row: Value<'k, u32>,
    group: Value<'k, u32>,
    /// Whether the group exists.
    in_bounds: Value<'k, bool>,
    chunks: Vec<Chunk<'k>>,
}

/// Records the kernel of a configuration. Its parameters are those of [`GroupQuantizationParams::launch`].
///
/// # Errors
/// None for a configuration from [`GroupQuantizationParams::config`].
pub fn quantize_groups(name: &str, config: GroupQuantizationConfig) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, THREADS, |k| {
        let regs = GroupQuantizationRegs::declare(k, config);
        let lane = (k.thread() & (config.lanes() - 1)).named("lane_of_group");
        let first = k.cta() * (GROUPS_PER_THREAD * config.groups_per_pass()) + k.thread() / config.lanes();
        let load = |pass| load_group(&regs, config, first + pass * config.groups_per_pass(), lane);
        for loaded in (0..GROUPS_PER_THREAD).map(load).collect::<Vec<_>>() {
            let scale = group_scale(&loaded.chunks, regs.eps, config).named("scale");
            let quantized: Vec<_> =
                loaded.chunks.iter().map(|chunk| chunk.divided(config.dtypes.1, scale)).collect();
            k.when(loaded.in_bounds, || {
                for (chunk, at) in quantized.iter().zip(elements(regs.out, config, &loaded, lane)) {
                    chunk.store(at);
                }
                k.when(lane.eq(0), || {
                    Chunk::of(Dtype::F32, &[scale]).store(regs.scales.row(loaded.row, loaded.group));
                });
            });
        }
    })
}

/// Loads a group by its number; further rows of the result are zeros.
#[track_caller]
fn load_group<'k>(
    regs: &GroupQuantizationRegs<'k>,
    config: GroupQuantizationConfig,
    number: Value<'k, u32>,
    lane: Value<'k, u32>,
) -> LoadedGroup<'k> {
    let row = number / regs.groups_per_row;
    let group = number - row * regs.groups_per_row;
    let mut loaded = LoadedGroup { row, group, in_bounds: number.lt(regs.groups), chunks: Vec::new() };
    let load = |at: Elements<'k>| at.load_when(row.lt(regs.rows), config.width, Access::Streaming);
    loaded.chunks = elements(regs.x, config, &loaded, lane).into_iter().map(load).collect();
    loaded
}

/// The addresses of a lane's chunks of a group in a tensor.
#[track_caller]
fn elements<'k>(
    tensor: StridedRows<'k>,
    config: GroupQuantizationConfig,
    loaded: &LoadedGroup<'k>,
    lane: Value<'k, u32>,
) -> Vec<Elements<'k>> {
    let row = tensor.row(loaded.row, lane.builder().constant(0));
    let first = row.at(loaded.group * config.group_size + lane * config.width);
    let step = config.lanes() * config.width;
    (0..config.group_size / step).map(|chunk| first.plus(chunk * step)).collect()
}

/// The scale of a group, the same in all of its lanes.
#[track_caller]
fn group_scale<'k>(
    chunks: &[Chunk<'k>],
    eps: Value<'k, f32>,
    config: GroupQuantizationConfig,
) -> Value<'k, f32> {
    let magnitudes = chunks.iter().flat_map(Chunk::numbers).map(|x| x.reinterpret::<u32>() & 0x7fff_ffff);
    let of_lane = magnitudes.fold(eps.reinterpret::<u32>(), |largest, x| largest.max(x));
    let masks = (0..config.lanes().ilog2()).rev().map(|bit| 1 << bit);
    let largest = masks.fold(of_lane, |largest, mask: u32| largest.max(largest.shuffle_xor(mask)));
    let scale = largest.reinterpret::<f32>() / config.dtypes.1.max();
    let is_nan = scale.is_nan();
    let scale = match config.power_of_two {
        true => ((scale.reinterpret::<u32>() + 0x7f_ffff) & 0xff80_0000).reinterpret::<f32>(),
        false => scale,
    };
    scale.unless(is_nan, f32::NAN)
}
