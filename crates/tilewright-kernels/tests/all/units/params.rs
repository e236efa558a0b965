//! Kernel parameters, from the host to the kernel.

use tilewright_kernels::params::{GlobalArray, each};
use tilewright_ptx::{Builder, Launch, Memory};

tilewright_kernels::params! {
    #[derive(Clone)]
    struct Pair => PairRegs(this) {
        second "_b": u32,
        first "_a": u64,
    }

    #[derive(Clone)]
    struct TestParams => TestRegs(this, has_pair: bool) {
        out: u64 as GlobalArray<u32>,
        host base: u32,
        pair "p": Option<Pair>[has_pair.then_some(())],
        factor: f32,
        sizes "": [u32; 2][each(["m", "n"], ())],
        computed: u32 = this.base + 1,
    }
}

#[test]
fn kernels_read_the_values_of_the_host() {
    for has_pair in [false, true] {
        let kernel = Builder::kernel("fields", 32, |k| {
            let p = TestRegs::declare(k, has_pair);
            let pair = p.pair.map(|pair| [pair.first.low(), pair.second]);
            let others = [p.factor.reinterpret(), p.sizes[0], p.sizes[1], p.computed];
            let values = pair.into_iter().flatten().chain(others);
            k.when(k.thread().eq(0), || (0..).zip(values).for_each(|(at, x)| p.out.plus(at).store(x)));
        })
        .unwrap();
        let names: Vec<_> = kernel.params.iter().map(|param| &*param.name).collect();
        let pair_names = if has_pair { &["p_b", "p_a"][..] } else { &[] };
        assert_eq!(names, [&["out"], pair_names, &["factor", "m", "n", "computed"]].concat());
        let mut memory = Memory::new();
        let out = memory.alloc(24);
        let pair = has_pair.then_some(Pair { first: 1, second: 2 });
        let params = TestParams { out, base: 5, pair, factor: f32::from_bits(3), sizes: [4, 5] };
        let args = params.args(has_pair);
        Launch { kernel: &kernel, grid: [1, 1, 1], args: &args, seed: 0 }.run(&mut memory).unwrap();
        let expected = if has_pair { &[1, 2, 3, 4, 5, 6][..] } else { &[3, 4, 5, 6] };
        assert_eq!(memory.read::<u32>(out, expected.len()).unwrap(), expected);
    }
}
