//! What a rank may be for `plan`: the devices that are known by name, and those of a user's own table.

use std::path::Path;

use serde_json::Value;

use crate::program::{RECIPE, Workshop};

/// The text of docs/memory.md.
fn page() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/memory.md")).unwrap()
}

/// The table that the page shows.
fn documented() -> String {
    let page = page();
    let (_, rest) = page.split_once("```toml\n[device]\n").expect("a table of a device");
    format!("[device]\n{}", rest.split("```").next().unwrap())
}

fn planned(shop: &Workshop, options: &str) -> Value {
    serde_json::from_str(&shop.succeeds(&format!("plan {RECIPE} --json {options}")).out).unwrap()
}

/// The documented table is loaded as it stands, and every figure of it arrives.
#[test]
fn a_device_may_be_a_table_of_the_users_own() {
    let shop = Workshop::new();
    shop.write("my-card.toml", &documented());
    let device = planned(&shop, "--device my-card.toml")["device"].clone();
    let number =
        |path: &str| device.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path}: {device}"));
    assert_eq!(device["name"], "my-card");
    for (path, expected) in [
        ("/memory", 24e9),
        ("/flops/0", 35e12),
        ("/flops/1", 71e12),
        ("/efficiency", 0.4),
        ("/bandwidth", 936e9),
        ("/ranks_per_node", 4.0),
        ("/within/latency_s", 5e-6),
        ("/within/bandwidth", 12e9),
        ("/between/latency_s", 20e-6),
        ("/between/bandwidth", 1.5e9),
        ("/host", 25e9),
        ("/host_memory", 256e9),
    ] {
        // Figures are written in other units, so a product of two rounds once.
        assert!((number(path) / expected - 1.0).abs() < 1e-12, "{path}: {}", number(path));
    }
    let text = shop.succeeds(&format!("plan {RECIPE} --device ./my-card.toml")).out;
    assert!(text.contains("fits: my-card has 24.0 GB"), "{text}");
    // What it says is what is planned with: half the rate takes longer, a name is a name.
    let slower = documented().replace("f32_tflops = 35", "f32_tflops = 0.35\nname = \"slow\"");
    shop.write("slower.toml", &slower);
    let [fast, slow] = ["my-card", "slower"].map(|name| planned(&shop, &format!("--device {name}.toml")));
    assert!(slow["seconds_total"].as_f64() > fast["seconds_total"].as_f64());
    assert_eq!(slow["device"]["name"], "slow");
}

/// Every figure says where it is from, in words and in JSON.
#[test]
fn figures_say_where_they_are_from() {
    let shop = Workshop::new();
    shop.write("my-card.toml", &documented());
    for (name, origins) in [
        ("this-machine", ["measured", "measured", "measured", "measured", "assumed"]),
        ("h100", ["data sheet", "data sheet", "data sheet", "assumed", "usual node"]),
        ("my-card.toml", ["table"; 5]),
    ] {
        let device = planned(&shop, &format!("--device {name}"))["device"].clone();
        let text = shop.succeeds(&format!("plan {RECIPE} --device {name}")).out;
        let figures = [
            ("memory", "memory"),
            ("flops", "products in bf16"),
            ("bandwidth", "copies"),
            ("efficiency", "of which are reached"),
            ("links", "link between nodes"),
        ];
        for ((field, told), origin) in figures.into_iter().zip(origins) {
            assert_eq!(device["origins"][field], origin, "{name}: {field}");
            let (_, section) = text.split_once("\ndevice   ").expect("a section of the device");
            let line = section.lines().find(|line| line.trim_start().starts_with(told)).expect("a line");
            assert!(line.ends_with(&format!("  {origin}")), "{name}: {line}");
        }
    }
}

#[test]
fn all_that_is_wrong_with_a_table_is_told_with_its_line() {
    let shop = Workshop::new();
    let wrong = documented()
        .replace("memory_gb = 24", "memory_gb = -24")
        .replace("f32_tflops = 35", "f32_tflop = 35")
        .replace("bf16_tflops = 71", "bf16_tflops = \"71\"")
        .replace("ranks_per_node = 4", "ranks_per_node = 0")
        .replace("latency_us = 20, ", "")
        .replace("host_memory_gb = 256", "colour = 3");
    shop.write("wrong.toml", &wrong);
    let words = [
        "7 problems",
        "device.memory_gb = -24 (wrong.toml:2): must be a finite number",
        "the nearest valid value is 0.001",
        "device.f32_tflop = 35 (wrong.toml:3): no such key; did you mean device.f32_tflops?",
        "device.bf16_tflops = \"71\" (wrong.toml:4): a string where a number is expected; did you mean 71?",
        "device.ranks_per_node = 0 (wrong.toml:",
        "device.between.latency_us (wrong.toml:",
        "device.colour = 3 (wrong.toml:",
        "device.host_memory_gb (wrong.toml:1): missing, and has no default; add host_memory_gb to [device]: a number",
    ];
    shop.fails(&format!("plan {RECIPE} --device wrong.toml"), 2, &words);
    shop.write("bare.toml", &documented().replace("[device]\n", ""));
    shop.fails(&format!("plan {RECIPE} --device bare.toml"), 2, &["did you mean device.memory_gb?"]);
    shop.fails(&format!("plan {RECIPE} --device {RECIPE}"), 2, &["train (tiny.toml:", "no such section", "device"]);
    shop.write("broken.toml", "[device\n");
    shop.fails(&format!("plan {RECIPE} --device broken.toml"), 2, &["broken.toml:1", "not TOML"]);
    shop.fails(&format!("plan {RECIPE} --device my-crd.toml"), 2, &["my-crd.toml", "cannot be read", "of a device"]);
    shop.fails(&format!("plan {RECIPE} --device abacus"), 2, &["abacus", "this-machine", "h200", "my-card.toml"]);
}

/// The table of named devices says what is planned with.
#[test]
fn the_documented_devices_are_those_that_are_known() {
    let (shop, page) = (Workshop::new(), page());
    let rows: Vec<Vec<&str>> = page
        .lines()
        .skip_while(|line| !line.starts_with("| device | memory, GB"))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let names: Vec<&str> = rows.iter().map(|row| row[0].trim_matches('`')).collect();
    assert_eq!(names, guildhall::plan::names().collect::<Vec<_>>());
    for (row, name) in rows.iter().zip(names) {
        let device = planned(&shop, &format!("--device {name}"))["device"].clone();
        let paths = ["/memory", "/flops/0", "/flops/1", "/bandwidth", "/ranks_per_node"];
        let paths = paths.iter().chain(&["/within/bandwidth", "/between/bandwidth", "/host", "/host_memory"]);
        let units = [1e9, 1e12, 1e12, 1e9, 1.0, 1e9, 1e9, 1e9, 1e9];
        for ((path, unit), cell) in paths.zip(units).zip(&row[1..]) {
            let (held, told) = (device.pointer(path).unwrap().as_f64().unwrap() / unit, cell.parse::<f64>().unwrap());
            // The page has up to four digits.
            assert!((held / told - 1.0).abs() < 0.01, "{name} {path}: {held}, documented {told}");
        }
    }
}

/// State on the host has to fit it, with that of all ranks of a node.
#[test]
fn the_host_of_a_node_holds_the_state_of_all_its_ranks() {
    let shop = Workshop::new();
    let away = "--set train.batch_tokens=512 --set memory.offload=host --set memory.tile=100";
    shop.write("card.toml", &documented());
    let state = planned(&shop, &format!("{away} --ranks 8 --device card.toml"))["bytes_offloaded"].as_u64().unwrap();
    assert!(state > 0);
    // Four ranks of a node, and an eighth to spare.
    let needed = 4 * state / 7 * 8;
    for (spare, fits) in [(1.001, true), (0.999, false)] {
        let memory = format!("host_memory_gb = {:.12}", needed as f64 * spare / 1e9);
        shop.write("card.toml", &documented().replace("host_memory_gb = 256", &memory));
        let plan = planned(&shop, &format!("{away} --ranks 8 --device card.toml"));
        assert_eq!(plan["fits"].as_bool(), Some(fits), "{memory}");
        let text = shop.succeeds(&format!("plan {RECIPE} {away} --ranks 8 --device card.toml")).out;
        let (is, other) = if fits { ("fits", "does not fit") } else { ("does not fit", "remedy   what fits: ") };
        assert!(text.contains(&format!("{is}: 4 ranks of a node keep")), "{text}");
        assert_eq!(text.contains(other), !fits, "{text}");
    }
    // Fewer ranks than a node has leave more to each.
    let plan = planned(&shop, &format!("{away} --device card.toml --ranks 2"));
    assert_eq!(plan["fits"].as_bool(), Some(true));
}

/// The search does not send state to a host without room.
#[test]
fn the_search_knows_how_much_a_host_has() {
    let shop = Workshop::new();
    let wide = "--set model.d_model=64 --set moe.d_expert=256 --set memory.tile=10";
    let tight = format!("--ranks 2 {wide} --set memory.offload=host --search --device card.toml");
    let found = |memory: f64, host: &str| {
        let table = documented().replace("memory_gb = 24", &format!("memory_gb = {memory:.9}"));
        shop.write("card.toml", &table.replace("host_memory_gb = 256", host));
        planned(&shop, &tight)["search"].as_array().unwrap().clone()
    };
    let is_away = |c: &&Value| !c["set"].to_string().contains("memory.offload=none");
    // A megabyte holds nothing, so that all is tried; what is least with state elsewhere is less than is needed with it here.
    let all = found(0.001, "host_memory_gb = 256");
    let away = all.iter().filter(is_away).map(|c| c["bytes"].as_u64().unwrap()).min().unwrap();
    let memory = away as f64 * 1.01 * 8.0 / 7.0 / 1e9;
    let roomy = found(memory, "host_memory_gb = 256");
    assert!(roomy.iter().filter(is_away).any(|candidate| candidate["fits"] == true));
    let none = found(memory, "host_memory_gb = 0");
    let away: Vec<&Value> = none.iter().filter(is_away).collect();
    assert!(away.iter().all(|c| c["fits"] == false && c["largest"] == "host memory") && !away.is_empty(), "{away:?}");
    found(0.001, "host_memory_gb = 0");
    let text = shop.succeeds(&format!("plan {RECIPE} {tight}")).out;
    assert!(text.contains("of a node host memory ("), "{text}");
}
