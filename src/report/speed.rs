//! Where the time of a step goes, and which share of what the machine can do it reaches.

use crate::metrics::{KernelShare, StepSpeed};

use super::format::{escape, percent, quantity};

/// Nothing of a run that nobody measured.
pub(super) fn draw(speed: Option<&StepSpeed>) -> String {
    let Some(speed) = speed else { return String::new() };
    let told = |share: Option<f64>| share.map_or("not told by this device".to_owned(), percent);
    let figures = [
        ("Model FLOP utilisation", percent(speed.utilization())),
        ("Products, of their ceiling", percent(speed.products_of_ceiling())),
        ("Step, of the roof", percent(speed.roof / speed.mean)),
        ("Products, of their roof", told(speed.products_of_roof())),
        ("Of the step not in products", told(speed.no_products().map(|seconds| seconds / speed.mean))),
        ("Ceiling, beside the steps", format!("{}FLOP/s", quantity(speed.ceilings.beside))),
        ("Ceiling, f32", format!("{}FLOP/s", quantity(speed.ceilings.f32_flops))),
        ("Ceiling, bf16", format!("{}FLOP/s", quantity(speed.ceilings.bf16_flops))),
        ("Copies", format!("{}B/s", quantity(speed.ceilings.copied))),
        ("Tokens a second", quantity(speed.tokens_per_s)),
    ];
    let figures: String =
        figures.iter().map(|(name, value)| format!("<tr><th>{name}</th><td>{value}</td></tr>")).collect();
    let row = |name: &str, seconds: f64| {
        let share = if speed.mean > 0.0 { seconds / speed.mean } else { 0.0 };
        format!(
            "<tr><th>{}</th><td>{:.2} ms</td><td>{}</td><td class=\"bar\"><i style=\"width:{:.1}%\"></i></td></tr>",
            escape(name),
            1e3 * seconds,
            percent(share),
            share.clamp(0.0, 1.0) * 100.0
        )
    };
    let kernel = |kernel: &KernelShare| row(&kernel.name, kernel.seconds);
    let within = speed.attention_products.map(|products| row("of which products", products.seconds));
    let [products, attention] = [&speed.products, &speed.attention].map(kernel);
    let kernels: String =
        [products, attention].into_iter().chain(within).chain(speed.others.iter().map(kernel)).collect();
    format!(
        "<section><h2>Speed <small>as measured by guildhall bench: {}; ranks {}, threads of each {}, steps {}</small></h2>\n\
         <div class=\"scroll\"><table><caption>Against this machine's ceilings</caption><tbody>{figures}</tbody></table></div>\
         <div class=\"scroll\"><table><caption>A step's time by kernel, mean of all ranks</caption>\
         <thead><tr><th>Kernel</th><th>Time</th><th colspan=\"2\">Of the step</th></tr></thead><tbody>{kernels}{}</tbody>\
         <tfoot>{}</tfoot></table></div></section>\n",
        escape(&speed.processor),
        speed.ranks,
        speed.threads,
        speed.steps,
        row("outside of kernels", speed.outside()),
        row("step", speed.mean)
    )
}
