//! Simulator throughput: printed without assertions.

use super::{kernel, run};
use std::time::Instant;
use tilewright_ptx::ir::Kernel;

fn arithmetic() -> Kernel {
    kernel(256, |k| {
        let x = k.global::<f32>("x");
        let (a, b) = (k.var::<f32>("a", 1.0), k.var::<f32>("b", 0.5));
        k.repeat((0, 2000), 1, |_| {
            for _ in 0..4 {
                a.set(a.get().mul_add(b.get(), 1.0));
                b.set(b.get() * 0.99);
            }
        });
        x.at(k.cta() * 256 + k.thread()).store(a.get());
    })
}

fn shared_memory() -> Kernel {
    kernel(256, |k| {
        let (x, tile) = (k.global::<f32>("x"), k.shared::<f32>("tile", 256, 16));
        tile.at(k.thread()).store(1.0);
        let sum = k.var::<f32>("sum", 0.0);
        k.repeat((0, 500), 1, |i| {
            k.sync_threads();
            sum.set(sum.get() + tile.at((k.thread() + i) & 255).load());
            k.sync_threads();
            tile.at(k.thread()).store(sum.get());
        });
        x.at(k.cta() * 256 + k.thread()).store(sum.get());
    })
}

fn global_memory() -> Kernel {
    kernel(256, |k| {
        let x = k.global::<f32>("x");
        let at = (k.thread() & 127) * 4 + (k.thread() >> 7) * 512;
        k.when(k.cta().eq(0), || {
            k.repeat((0, 1000), 1, |_| {
                let values = x.at(at).load_vector::<4>();
                x.at(at).store_vector(values.map(|value| value + 1.0));
            });
        });
    })
}

fn divergence() -> Kernel {
    kernel(256, |k| {
        let x = k.global::<u32>("x");
        let sum = k.var::<u32>("sum", 0);
        k.repeat((0, 100), 1, |_| {
            let i = k.var::<u32>("i", 0);
            k.loop_(|| {
                k.break_if(i.get().ge(k.thread() & 31));
                i.set(i.get() + 1);
                k.when((i.get() & 1).eq(0), || sum.set(sum.get() + i.get()));
            });
        });
        x.at(k.cta() * 256 + k.thread()).store(sum.get());
    })
}

#[test]
fn print_the_speed() {
    let kernels = [
        ("arithmetic", arithmetic()),
        ("shared memory and barriers", shared_memory()),
        ("global memory", global_memory()),
        ("divergence", divergence()),
    ];
    for (name, kernel) in &kernels {
        let start = Instant::now();
        let (_, report) = run(kernel, 4, &[0; 1024], 1).unwrap_or_else(|fault| panic!("{fault}"));
        let count = report.thread_instructions;
        let speed = count as f64 / start.elapsed().as_secs_f64() / 1e6;
        println!("{name}: {speed:.0} million thread-instructions a second ({count} in all)");
    }
}
